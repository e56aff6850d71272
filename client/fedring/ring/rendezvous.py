"""The default group of torch.distributed over addresses that a server has handed out, and what makes every group."""

import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from fedring.ring.endpoint import Endpoint
from fedring.ring.errors import RingError
from fedring.ring.meeting import meet
from fedring.ring.options import RingOptions
from fedring.ring.process_group import RingProcessGroup
from fedring.ring.world import World, current, set_current

_COLLECTIVE = timedelta(minutes=30)  # torch's own default


@dataclass(frozen=True, slots=True, eq=False)
class Seat:
    """A place in a world whose addresses are known."""

    endpoint: Endpoint
    members: Sequence[str]
    timeout: float  # seconds for the others to come


_joined: Endpoint | None = None
_lock = threading.Lock()


def join(
    endpoint: Endpoint, *, rank: int, members: Sequence[str], timeout: float, identities: Sequence[str] = ()
) -> None:
    """torch's default group is of these members, of which `endpoint` is one: all have come, and know that all have.

    RingError if one does not come within `timeout` seconds; then there is no group, and the endpoint is closed. Once
    joined, a collective may take half an hour: who is slow only slows, and who is gone is noticed by the streams. With
    the option tls_members_only each member must show its identity, of the same place.
    """
    global _joined
    if dist.is_initialized():
        raise RingError("there is a default group already: leave it before joining another")
    if endpoint.options.tls_members_only and len(identities) != len(members):
        raise RingError("the server does not name the members' identities: update it")
    endpoint.guests.expect(dict(zip(members, identities, strict=False)))
    with _lock:
        _joined = endpoint
    hook = sys.excepthook
    seat = Seat(endpoint, members, timeout)
    try:
        dist.init_process_group(
            "fedring",
            store=HashStore(),
            rank=rank,
            world_size=len(members),
            timeout=_COLLECTIVE,
            pg_options=seat,
        )
        dist.barrier(timeout=timedelta(seconds=timeout))
    except BaseException:
        leave()
        raise
    finally:
        sys.excepthook = hook  # torch wraps another one around it for every group


def leave() -> None:
    """There is no default group, and nothing of its endpoint is left; never hangs, whatever has failed before."""
    global _joined
    with _lock:
        endpoint, _joined = _joined, None
    if dist.is_initialized():
        dist.destroy_process_group()
    if endpoint is not None:
        endpoint.close()


def create(wanted: Any, options: Any) -> RingProcessGroup:
    """What torch calls for each group that this worker is in; `options` are RingOptions, a Seat, or None."""
    ranks = list(wanted.global_ranks_in_group)
    world = current() if ranks else None
    if world is not None:
        return _group(world, wanted, ranks, options)
    world, patience = _enter(wanted, options)
    try:
        group = _group(world, wanted, range(wanted.group_size), options)
        world.endpoint.wait_until_matched(group.ring, timeout=patience)
    except RingError:
        world.close()
        raise
    if not ranks:
        set_current(world)
    return group


def _enter(wanted: Any, options: Any) -> tuple[World, float]:
    """A new world, and how many seconds its members may take to come."""
    if isinstance(options, Seat):
        return World(options.endpoint, options.members), options.timeout
    world = meet(
        wanted.store,
        rank=wanted.group_rank,
        size=wanted.group_size,
        options=options or RingOptions(),
        timeout=wanted.timeout,
    )
    return world, wanted.timeout.total_seconds()


def _group(world: World, wanted: Any, ranks: Sequence[int], options: Any) -> RingProcessGroup:
    group = RingProcessGroup(world, wanted.store, ranks, name=wanted.group_id, timeout=wanted.timeout)
    group.use(options if isinstance(options, RingOptions) else world.endpoint.options)
    return group
