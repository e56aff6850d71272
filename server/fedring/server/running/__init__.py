"""The open rounds together, and how each is run to its end.

`rounds` holds those that are open, and `runner` performs what the state machine of each asks for: it lets clients
train, makes the next model, and keeps what must survive a restart. No kind of round but the plain one, no gRPC service
and no queue of jobs is known here.
Of the server, this room imports `aggregation`, `config`, `group`, `model`, `round`, `sessions` and `state`.
"""
