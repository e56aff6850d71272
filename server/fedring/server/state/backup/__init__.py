"""Backups of a state folder: how one is made while a server runs, what lies in it, and how it becomes a state again.

flctl calls `create.back_up` and `restore.restore`. The server needs `exchange` alone: it does not start on a folder in
which a restore was interrupted.
"""
