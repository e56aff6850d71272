"""The clients' sessions, and how long clients take to come back.

A session is one client from Join to the loss of its stream, with its outbox. Nothing here knows rounds, jobs or models.
Of the server, this room imports `state`.
"""
