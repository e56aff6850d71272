"""The samples of each worker in each step.

They are pure functions of a seed and of how far the epoch has come.

The steps of an epoch go through its order from the beginning to the end, whatever the number of workers is and whenever
it changes. Each sample is taken once. Only in the last step, a few of the first samples are taken again, so that all
workers have equal shares.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class GroupRank:
    """A worker's place in its group."""

    rank: int = 0
    size: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """The samples that one worker takes in one step."""

    indices: Tensor  # [n] int64; n is the same for all workers
    taken: int  # samples of the epoch that all workers together have taken after the step


def epoch_order(size: int, *, seed: int, epoch: int, wanted: int = 0) -> Tensor:
    """Return the order in which the workers go through an epoch.

    Args:
        size: The number of samples.
        seed: The round's seed.
        epoch: The number of the epoch within the round.
        wanted: How many samples to draw; 0, or a number not below `size`, means all of them.

    Returns:
        The indices of the samples, [n] int64.
    """
    digest = hashlib.sha256(f"{seed}:{epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    order = torch.randperm(size, generator=generator)
    return order[:wanted] if 0 < wanted < size else order


def shares(order: Tensor, taken: int, place: GroupRank, batch: int) -> Iterator[Share]:
    """Yield one worker's share of each step of the epoch.

    The first step begins with the sample at `taken` of `order`, [n] int64.

    Args:
        order: The result of epoch_order().
        taken: The samples that were taken before.
        place: The worker's rank, and the number of workers.
        batch: The samples of each worker in a step.
    """
    size = len(order)
    while taken < size:
        each = share_size(size - taken, place.size, batch)
        start = taken + place.rank * each
        taken = min(taken + place.size * each, size)
        yield Share(order[torch.arange(start, start + each) % size], taken)


def share_size(left: int, workers: int, batch: int) -> int:
    """Return each worker's number of samples in the next step.

    There are `left` samples left in the epoch.

    That is `batch`, except in the last step. The last step never leaves a single sample to a worker if `batch` is above
    1, because BatchNorm fails on a single one.
    """
    if left > workers * (batch + 1):
        return batch
    return max(-(-left // workers), min(batch, 2))


def micro_batches(indices: Tensor, *, size: int, most: int, unit: int = 1) -> Sequence[Tensor]:
    """Cut a batch into micro-batches of sizes as equal as possible.

    Args:
        indices: The samples of the batch, [n] int64. If n is below `unit`, some samples are taken twice.
        size: The smallest size of a micro-batch, if the batch is large enough for it.
        most: The largest number of micro-batches.
        unit: The number of micro-batches is a multiple of this.
    """
    count = min(most, len(indices) // max(1, size))
    count = max(unit, count - count % unit)
    return torch.tensor_split(indices[torch.arange(max(len(indices), count)) % len(indices)], count)


def count_steps(left: int, workers: int, batch: int) -> int:
    """Return the number of steps for `left` samples of an epoch."""
    steps = 0
    while left > 0:
        left -= workers * share_size(left, workers, batch)
        steps += 1
    return steps
