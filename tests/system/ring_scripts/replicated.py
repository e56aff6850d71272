"""Trainings whose parameters are the same on every rank, with what torch has around DistributedDataParallel.

Each function returns what is the same whichever backend the default group has.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    ddp_zero_hook,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.system.ring_scripts.ddp import batch
from tests.system.ring_scripts.sharded import flat, network, steps

# torch's functions without types
_untyped: Any = dist
_post_local_sgd: Any = post_localSGD_hook
differentiable: Any = torch.distributed.nn.functional


def compiled(rank: int, size: int, *, backend: str) -> list[float]:
    """Train a compiled DDP model; return the parameters."""
    model = DistributedDataParallel(network())
    faster: Any = torch.compile(model, backend=backend)
    steps(faster, torch.optim.SGD(model.parameters(), lr=0.1), rank)
    return flat(model)


def joined(rank: int, size: int) -> list[float]:
    """Train with one more batch on each rank than on the one before; return the parameters."""
    model = DistributedDataParallel(network())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with Join([model, optimizer]):
        for step in range(3 + rank):
            inputs, classes = batch(step, rank)
            optimizer.zero_grad()
            torch.autograd.backward(functional.cross_entropy(model(inputs), classes))
            optimizer.step()
    return flat(model)


def zero(rank: int, size: int) -> list[float]:
    """Train with an optimizer whose state is divided among the ranks; return the parameters and the whole state."""
    model = DistributedDataParallel(network(), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01, parameters_as_bucket_view=True)
    steps(model, optimizer, rank)
    optimizer.consolidate_state_dict(to=0)
    state = optimizer.state_dict()["state"] if rank == 0 else {}
    return [*flat(model), *(float(one["exp_avg"].sum()) for one in state.values())]


def zero_that_overlaps(rank: int, size: int) -> list[float]:
    """Train with an optimizer that takes its step in DDP's hook; return the parameters.

    The first steps, in which DDP makes its buckets, change no parameters.
    """
    model = DistributedDataParallel(network(), bucket_cap_mb=0.0001, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True)
    hook = ddp_zero_hook.hook_with_zero_step(default_hooks.allreduce_hook, model, optimizer)
    model.register_comm_hook(None, hook)
    before = flat(model)
    for first in range(3):
        steps(model, optimizer, rank, first=first)
    assert flat(model) != before
    return flat(model)


def hook(rank: int, size: int, *, name: str) -> list[float]:
    """Train with one of torch's communication hooks; return the parameters."""
    model = DistributedDataParallel(network())
    state: Any
    if name == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif name == "powerSGD":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        alone, _ = _untyped.new_subgroups(group_size=1)
        state = _post_local_sgd.PostLocalSGDState(None, alone, start_localSGD_iter=2)
        model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if name == "post_localSGD":
        optimizer = PostLocalSGDOptimizer(optimizer, PeriodicModelAverager(period=2, warmup_steps=2))
    steps(model, optimizer, rank)
    return flat(model)


def differentiable_collectives(rank: int, size: int) -> list[float]:
    """Gather embeddings with their gradients, as contrastive losses do; return the loss and the gradient."""
    inputs, _ = batch(0, rank)
    layer = nn.Linear(6, 16)
    layer.load_state_dict(network()[0].state_dict())
    every = torch.cat(differentiable.all_gather(layer(inputs)))
    loss = functional.cross_entropy(layer(inputs) @ every.T, torch.arange(len(inputs)) + rank * len(inputs))
    total = differentiable.all_reduce(loss)
    total.backward()
    exchanged = list(
        differentiable.all_to_all([torch.empty(2) for _ in range(size)], [torch.full((2,), float(rank))] * size)
    )
    assert layer.weight.grad is not None
    return [total.item(), *layer.weight.grad.flatten().tolist(), *torch.cat(exchanged).tolist()]


def objects(rank: int, size: int) -> list[Any]:
    """Send what can be pickled: gather, broadcast and scatter, and message by message."""
    mine = {"rank": rank, "names": ["a"] * rank}
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, mine)
    on_root: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(mine, on_root)
    shared = [mine, "text"] if rank == 0 else [None, None]
    dist.broadcast_object_list(shared)
    part: list[Any] = [None]
    dist.scatter_object_list(part, [f"part {one}" for one in range(size)] if rank == 0 else None)
    message: list[Any] = [mine] if rank == 1 else [None]
    if rank == 1:
        dist.send_object_list(message, dst=0)
    elif rank == 0:
        dist.recv_object_list(message, src=1)
    return [gathered, on_root, shared, part, message]


def sampler(rank: int, size: int) -> list[float]:
    """Train on a data set that a DistributedSampler divides, with workers; return the parameters and the samples."""
    inputs = torch.randn(22, 6, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, inputs.abs().argmax(1) % 3)
    divided: DistributedSampler[int] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=divided)
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        divided.set_epoch(epoch)
        for samples, classes in loader:
            optimizer.zero_grad()
            torch.autograd.backward(functional.cross_entropy(model(samples), classes))
            optimizer.step()
    return [*flat(model), *map(float, divided)]


def averages(rank: int, size: int) -> list[float]:
    """Train with an exponential moving average of the weights and BatchNorm; return the average and its statistics."""
    torch.manual_seed(7)
    network = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    model = DistributedDataParallel(network)
    average = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]  # torch's
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for first in range(2):
        steps(model, optimizer, rank, first=first)
        average.update_parameters(model.module)
    update_bn([batch(step, 0) for step in range(3)], average)
    buffers: list[Tensor] = [buffer.double().flatten() for buffer in average.buffers()]
    return [*flat(average), *torch.cat(buffers).tolist()]
