"""Groups of a measurement's ranks over several backends."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fedring.ctl.local.rank import Rank
from fedring.ring import RingProcessGroup


class Groups(NamedTuple):
    """The same ranks, connected by two backends."""

    gloo: dist.ProcessGroup
    fedring: dist.ProcessGroup


def join_groups(rank: Rank) -> Groups:
    """Join all ranks in two groups: over Gloo and the ring.

    Gloo also connects the default group.
    """
    rank.join("gloo")
    return Groups(make_group("gloo"), make_group("fedring"))


def make_group(backend: str, options: Any = None) -> dist.ProcessGroup:
    """Make a group of all ranks over a backend.

    `options` are the backend's own.
    """
    group = dist.new_group(backend=backend, pg_options=options)
    assert isinstance(group, dist.ProcessGroup)  # every rank is in it
    return group


def sent_bytes(group: dist.ProcessGroup) -> int:
    """Return the bytes that this rank of a group of the ring has sent so far, by streams and through memory."""
    assert isinstance(group, RingProcessGroup)
    traffic = group.world.endpoint.traffic
    return traffic.sent_bytes + traffic.shared_bytes


def largest(value: float) -> float:
    """Return the largest of a value over all ranks.

    All of them call this.
    """
    found = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def time_all_reduce(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> tuple[float, float]:
    """Return the seconds and the processor seconds of all-reduces, all of which start before the first wait."""
    for tensor in tensors:
        tensor.fill_(1e-6)
    dist.barrier()
    used, began = time.process_time(), time.perf_counter()
    if len(tensors) == 1:
        dist.all_reduce(tensors[0], group=group)
    else:
        works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
        for work in works:
            assert work is not None  # a rank of the group gets one
            work.wait()
    return time.perf_counter() - began, time.process_time() - used
