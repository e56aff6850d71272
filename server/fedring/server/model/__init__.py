"""Making models from accepted updates, and serving them to downloads.

`fedring.server.aggregation` combines the updates. The algorithms that jobs turn on are in `transforms`, with their
formulas beside it. The room also holds the first models, downloads, and the server's own evaluation. It knows nothing
of rounds, sessions or gRPC calls.
Of the server, this room imports `aggregation`, `config` and `state`.
"""
