"""Links between two workers: addresses, channels, frames, and the transports.

A link is a gRPC stream (`stream`), or, between ranks of one host, a stream whose frames move to a Unix socket and whose
large payloads lie in shared memory (`local`). Code belongs here if it moves frames to or from one peer. What frames
mean must not enter: nothing here decides by operations, groups or ranks, and nothing imports `engine` or PyTorch.
(`Traffic` also holds the counters that the engine feeds.)
"""
