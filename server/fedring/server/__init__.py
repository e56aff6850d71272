"""The server, which commands clients and makes models of their updates.

fl-server sends commands to fl-clients, accepts their updates, and makes the next model of them.

docs/architecture.md shows its rooms, and follows an update through them. The package may import `fedring.web` and what
both daemons share.
"""
