"""The client's side of secure aggregation: the protocol and its memory.

`fedring.secure` has the mathematics. `state` keeps what a round must not forget, `participant` answers the messages of
one round, `protection` makes integers of updates, and `client` connects both with the session and the user. What may
enter: what is done in rounds with secure aggregation only. What must not: the user's code, and torch.
"""
