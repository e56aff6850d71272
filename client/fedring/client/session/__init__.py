"""The client's session: joining, heartbeats, commands, and reconnecting.

All that is asynchronous runs here, on one event loop in a thread of its own; the user's threads call into it. What may
enter: the configuration, and what the server is to be told with the next heartbeat. What must not: models, updates,
groups and torch, which belong to the rooms above. They use the connection that is kept here.
"""
