"""Collectives between ranks, over any `Transport`.

A collective is a generator (`collectives`) that says what one rank sends and waits for. `program` steps it without
locks or I/O; `operation`, `group` and `endpoint` put the locks around it and bring the frames. Code belongs here if it
decides what goes to which rank, and what follows from what came. How bytes travel belongs to `transport`, and
`torch.distributed` to `torch`: nothing here imports that package, and of PyTorch only tensors are used.
"""
