"""Which samples each worker takes in each step: pure functions of a seed and of how far the epoch has come.

The law: whatever the number of workers, and whenever it changes, the steps of an epoch take its order from the
beginning to the end. Each sample is taken once, but for the last step, whose shares are made equal by taking a few of
the first samples again.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class World:
    """A worker's place in its group."""

    rank: int = 0
    size: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """What one worker takes in one step."""

    indices: Tensor  # [n] int64, as many for each worker
    taken: int  # samples of the epoch that all workers have taken after the step


def epoch_order(size: int, *, seed: int, epoch: int, wanted: int = 0) -> Tensor:
    """The order of an epoch over `size` samples, [n] int64: all of them, or `wanted` if that is above 0 and fewer."""
    digest = hashlib.sha256(f"{seed}:{epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    order = torch.randperm(size, generator=generator)
    return order[:wanted] if 0 < wanted < size else order


def shares(order: Tensor, taken: int, world: World, batch: int) -> Iterator[Share]:
    """The steps from the sample at `taken` to the end of `order` [n]."""
    size = len(order)
    while taken < size:
        each = share_size(size - taken, world.size, batch)
        start = taken + world.rank * each
        taken = min(taken + world.size * each, size)
        yield Share(order[torch.arange(start, start + each) % size], taken)


def share_size(left: int, workers: int, batch: int) -> int:
    """What each worker takes in the next step, with `left` samples in the epoch: `batch`, but in the last step.

    No worker is left with a single sample if it can be helped, as BatchNorm fails on one.
    """
    if left > workers * (batch + 1):
        return batch
    return max(-(-left // workers), min(batch, 2))


def micro_batches(indices: Tensor, *, size: int, most: int, unit: int = 1) -> Sequence[Tensor]:
    """`indices` [n] in at most `most` parts of `size` or more, as equal as can be; a multiple of `unit` of them.

    Where there are too few for one `unit`, some are taken again.
    """
    count = min(most, len(indices) // max(1, size))
    count = max(unit, count - count % unit)
    return torch.tensor_split(indices[torch.arange(max(len(indices), count)) % len(indices)], count)


def count_steps(left: int, workers: int, batch: int) -> int:
    """Steps that take the `left` samples of an epoch."""
    steps = 0
    while left > 0:
        left -= workers * share_size(left, workers, batch)
        steps += 1
    return steps
