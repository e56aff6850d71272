"""Ranks of process groups in one process, each with an endpoint of its own."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import HashStore

from fedring.ring import Endpoint, RingOptions, RingProcessGroup
from fedring.ring.torch.meeting import Candidate
from fedring.ring.torch.member import WIRE_DTYPES
from fedring.ring.torch.world import World

WAIT = timedelta(seconds=60)


@contextmanager
def ring_groups(size: int, **options: Any) -> Iterator[list[RingProcessGroup]]:
    """Make the ranks of a group with `options`. They leave it together at the end."""
    endpoints = [Endpoint(RingOptions(**options), generation=3) for _ in range(size)]
    members = [endpoint.address for endpoint in endpoints]
    groups = [
        RingProcessGroup(World(endpoint, members), HashStore(), range(size), name="0", timeout=WAIT)
        for endpoint in endpoints
    ]
    try:
        for group in groups:
            group.wire = WIRE_DTYPES[group.world.endpoint.options.wire_dtype]
            group.world.endpoint.wait_until_matched(group.ring, timeout=WAIT.total_seconds())
        yield groups
    finally:
        with ThreadPoolExecutor(size) as pool:
            list(pool.map(lambda group: group.shutdown(), groups))


def run(groups: Sequence[RingProcessGroup], start: Callable[[int, RingProcessGroup], Any]) -> None:
    """Start an operation on each rank, given the rank and its group, and wait for all."""
    works = [start(rank, group) for rank, group in enumerate(groups)]
    for work in works:
        assert work.wait(WAIT)


def candidate(worker: str, slot: int = 0, *, step: int = 0, formed: int = -1) -> Candidate:
    """Return a worker that wants to be one of three members."""
    return Candidate(worker=worker, slot=slot, size=3, address=f"{worker}:1", step=step, formed=formed)
