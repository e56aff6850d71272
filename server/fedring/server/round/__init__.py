"""Rounds, from the barrier to the evaluation.

`machine` is the pure state machine. The other modules perform what it asks for: they send commands to sessions, make
the next model, and keep what must survive a restart. No gRPC service and no queue of jobs is known here. It may import
`secure`, `group`, `model`, `sessions`, `config` and `state`.
"""
