"""Making models from accepted updates, and serving them to downloads.

Updates are combined by an aggregation rule, tile by tile. What else a job does to them is in `transforms`. The room
also holds the format of model files, the versions that are kept, and the server's own evaluation. It reads and writes
blobs through `fedring.server.state`. It knows nothing of rounds, sessions or gRPC calls.
Of the server, this room imports `config` and `state`.
"""
