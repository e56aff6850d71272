"""Verbs for who looks after a host: certificates, backups of the server's state, and doctor, which checks a host.

They work on files and ports of this host, and need no running server. What the server's own checks and backups do is
in `fedring.server`; here are only the verbs, and the checks that no daemon makes itself.
"""
