"""Trainings whose parameters are divided among the ranks of the default group, as the manuals of torch show them.

Each function returns what is the same whichever backend the group has: the whole parameters, or losses.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

from tests.system.ring_scripts.ddp import batch

STEPS = 4


def network() -> nn.Sequential:
    """Return the same small network on every rank."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, *, first: int = 0) -> None:
    """Take STEPS steps on this rank's batches."""
    for step in range(first, first + STEPS):
        inputs, classes = batch(step, rank)
        optimizer.zero_grad()
        torch.autograd.backward(functional.cross_entropy(model(inputs), classes))
        optimizer.step()


def whole(tensor: Any) -> Tensor:
    """Return all values of a tensor that may be divided among the ranks."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().flatten()


def flat(model: nn.Module) -> list[float]:
    """Return all parameters of a model."""
    values: list[float] = torch.cat([whole(parameter) for parameter in model.parameters()]).tolist()
    return values


def fsdp2(rank: int, size: int) -> list[float]:
    """Train with fully_shard on every layer, clip the gradients' norm, and return the parameters."""
    model = network()
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    steps(model, optimizer, rank)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return [*flat(model), *whole(norm).tolist()]


def dtensor(rank: int, size: int) -> list[float]:
    """Multiply a matrix that is divided by rows with a replicated one, and divide the product by columns."""
    mesh = init_device_mesh("cpu", (size,))
    generator = torch.Generator().manual_seed(3)
    left, right = torch.randn(5, 4, generator=generator), torch.randn(4, 6, generator=generator)
    product = distribute_tensor(left, mesh, [Shard(0)]) @ distribute_tensor(right, mesh, [Replicate()])
    columns = product.redistribute(mesh, [Shard(1)])  # type: ignore[attr-defined]  # a DTensor
    assert columns.to_local().shape == (5, 6 // size)
    torch.testing.assert_close(columns.full_tensor(), left @ right)
    return [*whole(columns).tolist(), *whole(columns.sum()).tolist(), *whole(columns.max(dim=0).values).tolist()]


def tensor_parallel(rank: int, size: int) -> list[float]:
    """Divide both layers among the ranks, train all ranks on the same batches, and return the parameters."""
    plan: Any = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(network(), init_device_mesh("cpu", (size,)), plan)
    steps(model, torch.optim.SGD(model.parameters(), lr=0.1), rank=0)
    return flat(model)


def mesh_of_two_dimensions(rank: int, size: int) -> list[float]:
    """Replicate over the rows of a mesh of ranks, shard over its columns (HSDP), and return the parameters."""
    model = network()
    fully_shard(model, mesh=init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("replicate", "shard")))
    steps(model, torch.optim.SGD(model.parameters(), lr=0.1), rank)
    return flat(model)


def pipelining(rank: int, size: int) -> list[float]:
    """Train one layer per rank with GPipe and two micro-batches; return the losses, which the last rank knows."""
    stage = PipelineStage([network()[:2], network()[2:]][rank], rank, size, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=functional.cross_entropy)
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.1)
    losses: list[float] = []
    for step in range(STEPS):
        parts: list[Tensor] = []
        inputs, classes = batch(step, 0)
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=classes, losses=parts)
        optimizer.step()
        losses += [part.item() for part in parts]
    return losses


def checkpoint(rank: int, size: int, *, folder: str, asynchronous: bool = False) -> list[float]:
    """Save a sharded training with DCP below `folder`, continue it in a new model, and return the parameters."""
    folder = f"{folder}/saved-by-{dist.get_backend()}"
    model = network()
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    steps(model, optimizer, rank)
    weights, state = get_state_dict(model, optimizer)
    saved = {"model": weights, "optimizer": state}
    if asynchronous:
        group: Any = dist.new_group()  # another thread uses it
        future: Any = async_save(saved, checkpoint_id=folder, process_group=group)
        steps(model, optimizer, rank, first=STEPS)  # goes on while the checkpoint is written
        future.result()
    else:
        save(saved, checkpoint_id=folder)
        steps(model, optimizer, rank, first=STEPS)
    assert (Path(folder) / ".metadata").is_file()
    again = network()
    fully_shard(again)
    optimizer = torch.optim.Adam(again.parameters(), lr=0.01)
    weights, state = get_state_dict(again, optimizer)
    load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(again, optimizer, model_state_dict=weights, optim_state_dict=state)
    steps(again, optimizer, rank, first=STEPS)
    assert flat(again) == flat(model)
    dist.barrier()
    return flat(again)
