"""What fl-server keeps: rows in a database, blobs in files, and how both survive a crash, a backup and a restore.

Nothing outside of this package knows SQLite, or where a file lies. It imports nothing else of the server.
"""
