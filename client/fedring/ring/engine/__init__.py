"""Collectives between ranks, over any `Transport`.

A collective is a generator (`collectives`) of one rank's sends and receives. `program` steps it without locks or I/O;
`operation`, `group` and `endpoint` put the locks around it and bring the frames. Code belongs here if it assigns data
to ranks, and acts on the data that came. How bytes travel belongs to `transport`, and `torch.distributed` to `torch`:
nothing here imports that package, and of PyTorch only tensors are used.
"""
