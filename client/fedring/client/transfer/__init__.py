"""Transfers: models to the client, and updates to the server.

Downloads and updates are values here, made and checked without I/O; around them are the retries, the spool on the disk,
and the residual, which changes only when an update is accepted. What may enter: bytes of the server's, and vectors that
were trained. What must not: the user's code, and how anything was trained.
"""
