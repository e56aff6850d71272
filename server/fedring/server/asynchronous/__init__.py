"""Asynchronous rounds, which wait for no slow client.

A round is the buffer that makes the next version. A client's command outlasts its round: the answer counts in the round
that is open when it comes. The rows of accepted updates are the buffer, so a restarted server goes on with what it had.
Of the server, this room imports `round`, `running`, `sessions` and `state`.
"""
