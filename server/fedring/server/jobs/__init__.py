"""The queue of jobs, and the model that each of them starts from.

A job is run round after round, also across restarts. The room may import `round` and the rooms below it; neither gRPC
services nor updates are known here.
"""
