"""The queue of jobs, and the first model of each.

A job is run round after round, also across restarts. Neither gRPC services nor updates are known here. Of the server,
this room imports `model`, `running` and `state`.
"""
