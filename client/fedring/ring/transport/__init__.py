"""Links between two workers: addresses, channels, frames, and the two implementations of `Transport`.

A link is a gRPC stream (`stream`), or, between ranks of one host, a stream whose frames move to a Unix socket and whose
large payloads lie in shared memory (`local`). Code belongs here if it moves frames to or from one peer. What a frame is
part of must not enter: nothing here knows operations, groups, ranks or torch, and nothing here imports `engine`.
"""
