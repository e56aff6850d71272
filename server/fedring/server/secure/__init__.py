"""Rounds with secure aggregation, in which the server learns only sums.

The server learns the sum of a group's updates, and nothing else of them.

`events` are the steps as values, `machine` says when each is due and who is out, and `combining` makes the seeds of
masks of the clients' shares. None of these reads a clock, sends or stores. `exchange` holds what the clients have sent
and are told, and `rounds` takes their messages and performs. Of the server, this room imports `model`, `round`,
`running`, `sessions` and `state`.
"""
