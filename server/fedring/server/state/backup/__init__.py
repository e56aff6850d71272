"""Backups of a state folder, and their restore.

A backup can be made while a server runs. flctl calls `create.back_up` and `restore.restore`. The server needs
`exchange` alone: it does not start on a folder in which a restore was interrupted.
"""
