"""The persistent state of fl-server: rows in a database, blobs in files.

Both survive a crash, a backup and a restore. `interfaces` states what a store and blobs promise, `store` and `blobs`
implement it, `facts` brings both to the event loop, and `identity` opens a state folder. Nothing outside of this
package knows SQLite, or where a file lies. Of the server, this room imports nothing.
"""
