"""The steps of `tests.bench.ddp` on each rank.

They are all-reduces in pieces, backward passes, and steps of training.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

from fedring.ctl.local.hook_steps import optimizer_for
from fedring.ctl.local.rank import Rank
from fedring.ddp.hooks import hook_by_name
from fedring.ddp.state import HookState
from fedring.offers import named
from fedring.train.batches import fetch, size_of
from fedring.train.losses import cross_entropy
from fedring.train.names.offered import collect
from fedring.train.names.seam import build_model
from tests.bench.hook_trainings import accuracy_of
from tests.bench.lab.groups import Groups, join_groups, largest
from tests.bench.lab.turns import alternate

BACKENDS = ("gloo", "fedring")
_MANY = 10_000  # pieces, from which on one repeat is enough
_WARM_UP = 2  # turns: DDP rebuilds its buckets after the first step


def all_reduce(rank: Rank, total: int, pieces: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """Measure all-reduces of `total` float32 values in pieces.

    All pieces are started before the first is waited for, as DistributedDataParallel does with its buckets.

    Returns:
        For each size and backend: `piece`, `backend`, and the `seconds` of each repeat on the slowest rank.
    """
    groups = join_groups(rank)._asdict()
    values = torch.zeros(total)
    rows: list[dict[str, Any]] = []
    for number, piece in enumerate(pieces):
        parts = torch.split(values, piece)
        ways = {name: partial(_all_reduce, parts, groups[name], rank) for name in BACKENDS}
        many = len(parts) > _MANY
        seconds = alternate(ways, 1 if many else repeats, warm_up=0 if many else 1)
        rows += [{"piece": piece, "backend": name, "seconds": spent} for name, spent in seconds.items()]
        rank.report(number + 1, len(pieces))
    rank.leave()
    return rows


def _all_reduce(parts: Sequence[Tensor], group: dist.ProcessGroup, rank: Rank) -> float:
    dist.barrier()
    began = time.perf_counter()
    works = [dist.all_reduce(part, group=group, async_op=True) for part in parts]
    for work in works:
        assert work is not None  # a rank of the group gets one
        work.wait()
    return largest(time.perf_counter() - began)


def gradients_ready(rank: Rank, model: str, shape: Sequence[int], repeats: int) -> dict[str, Any]:
    """Measure when the gradient of each parameter is ready.

    The times are in seconds after the backward pass has begun.

    Returns:
        `parameters`: how many values have a gradient after each of the model's tensors; `seconds`: the median time of
        that moment over the repeats; `lowest` and `highest`: the fastest and the slowest repeat.
    """
    network = build_model(model, {}, 0, collect(named(model=model)))
    inputs = torch.randn(*shape)
    moments: list[tuple[int, float]] = []

    def note(parameter: Tensor) -> None:
        moments.append((parameter.numel(), time.perf_counter()))

    for parameter in network.parameters():
        parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]  # torch's
    runs = []
    for number in range(1 + repeats):
        loss = network(inputs).square().mean()
        moments.clear()
        began = time.perf_counter()
        loss.backward()
        runs.append([moment - began for _, moment in moments])
        rank.report(number + 1, 1 + repeats)
    spent = torch.tensor(runs[1:], dtype=torch.float64)
    return {
        "parameters": torch.tensor([count for count, _ in moments]).cumsum(0).tolist(),
        "seconds": spent.median(0).values.tolist(),
        "lowest": spent.min(0).values.tolist(),
        "highest": spent.max(0).values.tolist(),
    }


def steps(
    rank: Rank, model: str, shape: Sequence[int], ways: Sequence[Sequence[dict[str, Any]]], turns: int, iterations: int
) -> list[dict[str, Any]]:
    """Measure steps of DistributedDataParallel on random data.

    Args:
        rank: Which rank this process is.
        model: The function that makes the model, as module:name.
        shape: Shape of the inputs of a rank's step.
        ways: Sets of ways to train; those of a set take turns. A way has `backend` (noop, gloo, fedring, or dgc, which
            is fedring with this hook), and optionally `bucket_mib`, `every`, the steps between two all-reduces, and
            `parameters`, of which the model gets the number.
        turns: Turns to measure.
        iterations: Steps of a turn.

    Returns:
        For each way, its keys and the `seconds` of a step in each turn, on the slowest rank.
    """
    groups = join_groups(rank)
    rows: list[dict[str, Any]] = []
    for number, together in enumerate(ways):
        measures = {
            str(index): partial(_turn, _training(model, shape, groups, way), way.get("every", 1), iterations, rank)
            for index, way in enumerate(together)
        }
        seconds = alternate(measures, turns, warm_up=_WARM_UP)
        rows += [{**way, "seconds": seconds[str(index)]} for index, way in enumerate(together)]
        rank.report(number + 1, len(ways))
    rank.leave()
    return rows


def accuracies(
    rank: Rank, model: str, data: str, every: Sequence[int], steps: int, seeds: int, batch_size: int, lr: float
) -> list[dict[str, Any]]:
    """Train with an all-reduce every so many steps, on the same batches, and return the accuracies.

    Args:
        rank: Which rank this process is.
        model: The function that makes the model, as module:name.
        data: The function that returns the samples, as module:name.
        every: The numbers of steps from one all-reduce and one step of the optimizer to the next.
        steps: Batches of each training on each rank; the same for all of them.
        seeds: Trainings with each number.
        batch_size: Samples of a batch.
        lr: Learning rate, with momentum 0.9. Gradients without an all-reduce add up, as in the paper.
    """
    rank.join("fedring")
    split = collect(named(data=data)).get("data", data)(None, False)
    rows: list[dict[str, Any]] = []
    for number, count in enumerate(every):
        found = []
        for seed in range(seeds):
            network = build_model(model, {}, seed, collect(named(model=model)))
            parallel = DistributedDataParallel(network)
            optimizer = torch.optim.SGD(network.parameters(), lr=lr, momentum=0.9)
            generator = torch.Generator().manual_seed(1000 * seed + rank.number)
            cuts = [torch.randint(size_of(split.train), (batch_size,), generator=generator) for _ in range(steps)]
            for step, (inputs, labels) in enumerate(fetch(split.train, cuts, torch.device("cpu")), 1):
                exchange = step % count == 0
                with nullcontext() if exchange else parallel.no_sync():
                    torch.autograd.backward(cross_entropy(parallel(inputs), labels))
                if exchange:
                    optimizer.step()
                    optimizer.zero_grad()
            found.append(accuracy_of(rank, network, split.test))
        rank.report(number + 1, len(every))
        rows.append({"every": count, "accuracies": found})
    rank.leave()
    return rows


Step = Callable[[bool], None]  # takes whether gradients are exchanged


def _turn(step: Step, every: int, iterations: int, rank: Rank) -> float:
    """Return the seconds of one of so many steps."""
    dist.barrier()
    began = time.perf_counter()
    for number in range(iterations):
        step((number + 1) % every == 0)
    return largest((time.perf_counter() - began) / iterations)


def _training(model: str, shape: Sequence[int], groups: Groups, way: dict[str, Any]) -> Step:
    """Return a step of training in one of the ways."""
    arguments = {"parameters": way["parameters"]} if "parameters" in way else {}
    network: nn.Module = build_model(model, arguments, 0, collect(named(model=model)))
    inputs = torch.randn(*shape)
    group = groups.gloo if way["backend"] == "gloo" else groups.fedring
    options = {"bucket_cap_mb": way["bucket_mib"]} if "bucket_mib" in way else {}
    parallel = DistributedDataParallel(network, process_group=group, **options)
    state: HookState | None = None
    if way["backend"] == "noop":
        parallel.register_comm_hook(None, noop_hook)
    elif way["backend"] == "dgc":
        state, hook = hook_by_name("dgc(warmup_epochs=0)", network.named_parameters(), group)
        parallel.register_comm_hook(state, hook)
    optimizer = optimizer_for(state, network.parameters(), lr=1e-4)

    def step(exchange: bool) -> None:
        # Without an exchange, gradients only add up; the next step with one sends their sum.
        with nullcontext() if exchange else parallel.no_sync():
            torch.autograd.backward(parallel(inputs).square().mean())
        if exchange:
            if state is not None:
                state.end_step()
            optimizer.step()
            optimizer.zero_grad()

    return step
