"""Verbs for a host's administrator: certificates, backups, and doctor.

Backups are of the server's state, and doctor checks a host. They work on files and ports of this host, and need no
running server. What the server's own checks and backups do is in `fedring.server`; here are only the verbs, and the
checks that no daemon makes itself.
"""
