"""A round from its barrier to its evaluation, and the queue of jobs that rounds belong to.

`machine` is the pure state machine. The other modules perform what it asks for: they send commands to sessions, make
the next model, and keep what must survive a restart. No gRPC service is known here.
"""
