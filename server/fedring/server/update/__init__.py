"""The way of an update into the server: what is checked of its header and payload, and its durable acceptance.

What a client sends is hostile until it was admitted here. Nothing here imports gRPC's server.
Of the server, this room imports `model`, `round` and `state`.
"""
