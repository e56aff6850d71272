"""fl-server: it sends commands to fl-clients, accepts their updates, and makes the next model of them.

The rooms are `round`, `update`, `model`, `state`, `group` and `operator`; `service` and `guard` stand between them and
gRPC. docs/architecture.md follows an update through them. The package may import `fedring.web` and what both daemons
share.
"""
