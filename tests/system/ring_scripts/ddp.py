"""Trainings with torch's DistributedDataParallel over the default group, and the same trainings on one process."""

import hashlib
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from tests.system.ring_scripts.ranks import error_of

STEPS, BATCH = 6, 4  # per rank


class Net(nn.Module):
    """Two layers and two heads, of which a batch uses one; with `norm`, there is a BatchNorm between the layers."""

    def __init__(self, *, norm: bool = False, width: int = 16) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(6, width), nn.BatchNorm1d(width) if norm else nn.Tanh(), nn.Linear(width, width)
        )
        self.heads = nn.ModuleList([nn.Linear(width, 3), nn.Linear(width, 3)])

    def forward(self, inputs: Tensor, head: int = 0) -> Tensor:
        """Logits [batch, 3] of inputs [batch, 6]."""
        logits: Tensor = self.heads[head](self.body(inputs).relu())
        return logits


class Plan(NamedTuple):
    """The settings of a training."""

    bucket_mb: float = 25.0
    accumulate: int = 1  # batches per step
    unused: bool = False  # every second rank and step uses the other head
    norm: bool = False
    hook: str = ""
    width: int = 16
    steps: int = STEPS
    pair: bool = False  # ranks 2 k and 2 k + 1 train together


class Outcome(NamedTuple):
    """What a training ends with on one rank."""

    parameters: list[float]
    digest: str
    buffers: str


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return inputs [BATCH, 6] and classes [BATCH]."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(BATCH, 6, generator=generator), torch.randint(0, 3, (BATCH,), generator=generator)


def train(rank: int, size: int, *, plan: Plan) -> Outcome:
    """Train on this rank's batches."""
    group = _pair(rank, size) if plan.pair else None
    model = _net(plan)
    if not plan.unused:
        model.heads[1].requires_grad_(False)
    parallel = DistributedDataParallel(
        model, bucket_cap_mb=plan.bucket_mb, find_unused_parameters=plan.unused, process_group=group
    )
    _register(parallel, plan.hook)
    optimizer = torch.optim.SGD(_trained(model), lr=0.1, momentum=0.9)
    for step in range(plan.steps):
        optimizer.zero_grad()
        for part in range(plan.accumulate):
            last = part == plan.accumulate - 1
            with nullcontext() if last else parallel.no_sync():
                _loss(parallel, plan, step * plan.accumulate + part, rank).backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.step()
    parallel.eval()
    parallel(batch(0, rank)[0])  # sends the buffers, and changes none
    return _outcome(model)


def train_words(rank: int, size: int, *, alone: bool = False) -> list[float]:
    """Train a model with a sparse gradient, and return its parameters.

    All ranks train it together, or, with `alone`, this process trains on the batches of all.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Flatten(), nn.Linear(8, 3))
    trained = model if alone else DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for one in range(size) if alone else [rank]:
            words = torch.randint(0, 20, (BATCH, 2), generator=torch.Generator().manual_seed(100 * step + one))
            loss = functional.cross_entropy(trained(words), words.sum(1) % 3)
            torch.autograd.backward(loss / size if alone else loss)
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


def train_alone(ranks: Iterable[int], plan: Plan) -> Outcome:
    """Train on the batches of all ranks on one process, where each step takes all of them."""
    ranks = list(ranks)
    model = _net(plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(plan.steps):
        optimizer.zero_grad()
        for part in range(plan.accumulate):
            for rank in ranks:
                (_loss(model, plan, step * plan.accumulate + part, rank) / len(ranks)).backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.step()
    return _outcome(model)


def train_often(rank: int, size: int, *, plan: Plan, times: int) -> list[str]:
    """Train several times, and return the digests of the parameters after each training."""
    return [train(rank, size, plan=plan).digest for _ in range(times)]


def train_or_fail(rank: int, size: int, *, plan: Plan) -> tuple[str, list[float]]:
    """Train, and return the kind of the error that ends it, or "", and the parameters."""
    parameters: list[float] = []
    error = error_of(lambda: parameters.extend(train(rank, size, plan=plan).parameters))
    return error["kind"], parameters


def _pair(rank: int, size: int) -> dist.ProcessGroup:
    groups: list[Any] = [dist.new_group([first, first + 1]) for first in range(0, size, 2)]
    group: dist.ProcessGroup = groups[rank // 2]
    return group


def _net(plan: Plan) -> Net:
    torch.manual_seed(5)
    return Net(norm=plan.norm, width=plan.width)


def _trained(model: Net) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _loss(model: nn.Module, plan: Plan, step: int, rank: int) -> Tensor:
    inputs, classes = batch(step, rank)
    head = (step + rank) % 2 if plan.unused else 0
    return functional.cross_entropy(model(inputs, head), classes) / plan.accumulate


def _outcome(model: nn.Module) -> Outcome:
    values = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    buffers = b"".join(buffer.numpy().tobytes() for buffer in model.buffers())
    return Outcome(
        values.tolist(), hashlib.sha256(values.numpy().tobytes()).hexdigest(), hashlib.sha256(buffers).hexdigest()
    )


def _register(model: DistributedDataParallel, hook: str) -> None:
    if hook == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif hook == "power":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif hook == "batched power":
        batched = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        model.register_comm_hook(batched, powerSGD_hook.batched_powerSGD_hook)
    elif hook == "alternate":
        model.register_comm_hook([dist.new_group(), dist.new_group()], _alternate)


def _alternate(groups: list[dist.ProcessGroup], bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Reduce the buckets on two groups by turns."""
    group = groups[bucket.index() % 2]
    buffer = bucket.buffer().div_(group.size())
    work: Any = dist.all_reduce(buffer, group=group, async_op=True)
    first: Callable[[Any], Tensor] = lambda done: done.value()[0]  # noqa: E731
    future: torch.futures.Future[Tensor] = work.get_future().then(first)
    return future
