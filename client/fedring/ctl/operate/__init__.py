"""Verbs that call a running fl-server.

They start and stop jobs, show what the server knows, and manage tokens. A verb here is one call to the control port
(`fedring.control.calls`) and a table or JSON of its answer. Nothing here starts a daemon or reads the server's files.
"""
