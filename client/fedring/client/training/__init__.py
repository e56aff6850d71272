"""Training as jobs declare it.

It holds the trainer of fl-client, and the parts of training that the simulation runs, too.
Of the client, it may import everything but `main`.
"""
