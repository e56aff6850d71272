"""One round, from the barrier to the evaluation.

`machine` is the pure state machine. Each open round is an object, and its kind says what it does otherwise than a plain
one. The other modules send its commands to sessions and tell operators of it. `running` knows the others that are open.
Of the server, this room imports `aggregation`, `group`, `model`, `sessions` and `state`.
"""
