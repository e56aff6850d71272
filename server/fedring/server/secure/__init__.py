"""The server's side of secure aggregation: it learns the sum of a group's updates, and nothing else of them.

`events` are the steps as values, `machine` says when each is due and who is out, `groups` draws the groups, and
`combining` makes the seeds of masks of the clients' shares, with `correcting` if some of these are wrong. Nothing here
reads a clock, sends or stores: `fedring.server.round` does.
"""
