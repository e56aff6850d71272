"""Rounds, from the barrier to the evaluation.

`machine` is the pure state machine. The other modules perform what it asks for: they send commands to sessions, make
the next model, and keep what must survive a restart. Each open round is an object, of which `rounds` holds those that
are open, and its kind says what it does otherwise than a plain one. No kind but the plain one, no gRPC service and no
queue of jobs is known here.
Of the server, this room imports `aggregation`, `config`, `group`, `model`, `sessions` and `state`.
"""
