"""Training as a job declares it: the trainer of fl-client, and its parts that the simulation runs, too.

Of the client, it may import everything but `main`.
"""
