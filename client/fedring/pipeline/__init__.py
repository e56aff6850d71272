"""Models in stages, and micro-batches that pass through them.

The stages are in one process, or spread over any group of torch.distributed.

The package is a library: it cuts a model into stages, runs the forwards and backwards of a stage with the right version
of its weights, exchanges messages between stages, and follows a schedule of `fedring.schedules`. It may import torch
and `fedring.schedules`; it knows nothing of jobs, servers, configuration or the ring. Pipeline jobs are in
`fedring.workers`, and calls between owners of modules in `fedring.remote`.
"""
