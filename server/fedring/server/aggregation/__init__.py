"""The next model, from a base model and the accepted updates.

A rule combines the updates, tile by tile, and the steps of a job's transforms take part. The room also holds the format
of model files, and the versions that are kept. It knows nothing of features, rounds, sessions or gRPC calls.
Of the server, this room imports `state`.
"""
