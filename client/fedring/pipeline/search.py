"""The best number of micro-batches, from a measured curve: few leave a bubble, many make each too small."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist


class Point(NamedTuple):
    """A number of micro-batches, and the median seconds of a step with it on the slowest worker."""

    micro_batches: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Curve:
    """What was measured, in the order of the candidates."""

    points: list[Point]

    @property
    def best(self) -> int:
        """The number whose step is the fastest; the smaller of equals."""
        return min(self.points, key=lambda point: (point.seconds, point.micro_batches)).micro_batches


def search_micro_batches(
    step: Callable[[int], object],
    candidates: Sequence[int],
    *,
    repeats: int = 5,
    group: dist.ProcessGroup | None = None,
) -> Curve:
    """The curve of `step(micro_batches)` over the candidates; the same one on every rank of the group.

    The candidates are measured by turns, so that a passing load hits all of them, and each is tried once before.
    """
    if not candidates or min(candidates) < 1 or repeats < 1:
        raise ValueError(f"candidates {list(candidates)} and {repeats} repeats: all must be at least 1")
    spent: list[list[float]] = [[] for _ in candidates]
    for turn in range(repeats + 1):
        for seconds, count in zip(spent, candidates, strict=True):
            began = time.perf_counter()
            step(count)
            if turn:
                seconds.append(time.perf_counter() - began)
    medians = torch.tensor([statistics.median(seconds) for seconds in spent], dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(medians, dist.ReduceOp.MAX, group=group)
    return Curve([Point(count, seconds) for count, seconds in zip(candidates, medians.tolist(), strict=True)])
