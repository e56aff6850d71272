"""An update's path into the server: checks, then durable acceptance.

Its header and its payload are checked. What a client sends is hostile until it was admitted here. Nothing here imports
gRPC's server.
Of the server, this room imports `aggregation`, `round`, `running` and `state`.
"""
