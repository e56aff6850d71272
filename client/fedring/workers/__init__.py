"""A round as one worker of a group.

The group trains data-parallel with DistributedDataParallel, or as stages of a pipeline.

The package holds a worker's tasks between two changes of its group: choosing samples, training epochs, and becoming
equal to its peers. It uses torch's default process group, which the caller has set up, and knows nothing of the server,
of configuration files or of the ring: those belong to `fedring.client`. It may import `fedring.ddp`, `fedring.pipeline`
and what both daemons share.
"""
