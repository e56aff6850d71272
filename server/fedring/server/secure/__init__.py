"""The server's side of secure aggregation: it learns the sum of a group's updates, and nothing else of them.

`machine` says when each step of the protocol is due and who is out, `groups` draws the groups, `combining` makes the
seeds of masks of the clients' shares. Nothing here reads a clock, sends or stores: `fedring.server.round` does.
"""
