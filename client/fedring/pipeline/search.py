"""The search for the best number of micro-batches.

Few leave a large bubble, and many make each one too small.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist


class Point(NamedTuple):
    """The measurement of one number of micro-batches."""

    micro_batches: int
    seconds: float  # the median of a step's time on the slowest worker


@dataclass(frozen=True, slots=True)
class Curve:
    """The measurements, in the order of the candidates."""

    points: list[Point]

    @property
    def best(self) -> int:
        """The number of micro-batches with the fastest step.

        Of equally fast ones, it is the smallest.
        """
        return min(self.points, key=lambda point: (point.seconds, point.micro_batches)).micro_batches


def search_micro_batches(
    step: Callable[[int], object],
    candidates: Sequence[int],
    *,
    repeats: int = 5,
    group: dist.ProcessGroup | None = None,
) -> Curve:
    """Measure steps with different numbers of micro-batches.

    The candidates take turns, so that a passing load affects all of them. The first turn is not measured.

    Args:
        step: Takes a number of micro-batches and does one step with it.
        candidates: The numbers of micro-batches to try.
        repeats: How often each candidate is measured.
        group: The process group whose ranks all call this; None means the default group, if there is one.

    Returns:
        The same curve on every rank of the group.
    """
    if not candidates or min(candidates) < 1 or repeats < 1:
        raise ValueError(f"candidates {list(candidates)} and repeats={repeats} must all be at least 1")
    spent: list[list[float]] = [[] for _ in candidates]
    for turn in range(repeats + 1):
        for seconds, count in zip(spent, candidates, strict=True):
            began = time.perf_counter()
            step(count)
            if turn:
                seconds.append(time.perf_counter() - began)
    medians = torch.tensor([statistics.median(seconds) for seconds in spent], dtype=torch.float64)
    # The slowest rank determines the time of a step. Equal medians also make all ranks choose the same number.
    if dist.is_initialized():
        dist.all_reduce(medians, dist.ReduceOp.MAX, group=group)
    return Curve([Point(count, seconds) for count, seconds in zip(candidates, medians.tolist(), strict=True)])
