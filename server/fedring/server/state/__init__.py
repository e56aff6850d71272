"""The persistent state of fl-server: rows in a database, blobs in files.

Both survive a crash, a backup and a restore. `sql` is the store of rows, `blob_interfaces` states the promises of
blobs, which `blobs` implements, `facts` brings both to the event loop, and `identity` opens a state folder. Nothing
outside of this package knows SQLite, or where a file lies. Of the server, this room imports nothing.
"""
