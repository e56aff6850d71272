"""The server, which commands clients and makes models of their updates.

fl-server sends commands to fl-clients, accepts their updates, and makes the next model of them.

The rooms are `jobs`, `round`, `update`, `secure`, `group`, `sessions`, `model`, `state` and `operator`; `service` and
`guard` stand between them and gRPC. docs/architecture.md follows an update through them. The package may import
`fedring.web` and what both daemons share.
"""
