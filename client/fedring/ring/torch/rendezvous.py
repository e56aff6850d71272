"""How workers come together: by addresses that a server hands out, or through torch's store, as init_process_group
does.

`create` is what torch calls to make every group.
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed import DistStoreError

from fedring.ring.engine.endpoint import Endpoint
from fedring.ring.errors import PeerLost, RingError
from fedring.ring.options import RingOptions
from fedring.ring.torch.process_group import RingProcessGroup
from fedring.ring.torch.world import World, current, set_current

_COLLECTIVE = timedelta(minutes=30)  # torch's own default
_DISCARD = 9  # any port would do: nothing is sent


@dataclass(frozen=True, slots=True, eq=False)
class Seat:
    """A place in a world whose addresses are known."""

    endpoint: Endpoint
    members: Sequence[str]  # the addresses of all ranks
    timeout: float  # seconds that the other ranks may take to come


_joined: Endpoint | None = None
_lock = threading.Lock()


def join(
    endpoint: Endpoint, *, rank: int, members: Sequence[str], timeout: float, identities: Sequence[str] = ()
) -> None:
    """Form torch's default group. When this returns, all members have come, and know that all have.

    Once joined, a collective may take half an hour: a slow rank only slows the others, and a rank that is gone is
    noticed by its streams.

    Args:
        endpoint: This worker's endpoint.
        rank: This worker's rank.
        members: The addresses of all ranks, by rank; one is the endpoint's.
        timeout: Seconds that the other members may take to come.
        identities: The identities of all ranks, by rank, which their certificates must show; needed only with the
            option tls_members_only.

    Raises:
        RingError: A member has not come in time, or there is a default group already. In the first case there is no
            group, and the endpoint is closed.
    """
    global _joined
    if dist.is_initialized():
        raise RingError("there is a default group already: leave it before joining another")
    if endpoint.options.tls_members_only and len(identities) != len(members):
        raise RingError("the server does not name the members' identities: update it")
    endpoint.members.expect(dict(zip(members, identities, strict=False)))
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
    """Leave torch's default group, and close its endpoint. Never hang, whatever has failed before."""
    global _joined
    with _lock:
        endpoint, _joined = _joined, None
    if dist.is_initialized():
        dist.destroy_process_group()
    if endpoint is not None:
        endpoint.close()


def create(wanted: Any, options: Any) -> RingProcessGroup:
    """Make a group that this worker is in; torch calls it.

    Args:
        wanted: torch's description of the group.
        options: RingOptions, a Seat, or None.

    Raises:
        RingError: The neighbours have not come in time, or the generation has failed.
    """
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


def meet(store: Store, *, rank: int, size: int, options: RingOptions, timeout: timedelta) -> World:
    """Form a world of `size` workers that use one store, as env://, tcp:// and file:// give it.

    Raises:
        PeerLost: A rank has not come in time; the error names it.
    """
    if rank == 0:
        store.set("generation", str(int(time.time())))  # rises, so that frames of an earlier run are told apart
    _wait(store, ["generation"], [0], timeout)
    endpoint = Endpoint(_with_listen(options, store), generation=int(store.get("generation")))
    try:
        store.set(f"address/{rank}", endpoint.address)
        ranks = list(range(size))
        keys = [f"address/{one}" for one in ranks]
        _wait(store, keys, ranks, timeout)
        return World(endpoint, [store.get(key).decode() for key in keys])
    except BaseException:
        endpoint.close()
        raise


def _enter(wanted: Any, options: Any) -> tuple[World, float]:
    """Return a new world, and how many seconds its members may take to come."""
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
    group.use_options(options if isinstance(options, RingOptions) else world.endpoint.options)
    return group


def _wait(store: Store, keys: list[str], ranks: list[int], timeout: timedelta) -> None:
    """Wait until the keys are set, each by the rank in its place; raise PeerLost if one is not."""
    try:
        store.wait(keys, timeout)
    except DistStoreError as error:
        missing = [rank for key, rank in zip(keys, ranks, strict=True) if not store.check([key])]
        first = missing[0] if missing else 0
        raise PeerLost(f"rank {first} did not come within {timeout.total_seconds():g} s", rank=first) from error


def _with_listen(options: RingOptions, store: Store) -> RingOptions:
    """Return the options; if they do not say where to listen, with the interface from which the store is reached."""
    if "listen" in options.model_fields_set:
        return options
    host = _interface(_store_host(store))
    return options.model_copy(update={"listen": f"[{host}]:0" if ":" in host else f"{host}:0"})


def _store_host(store: Store) -> str:
    """Return the host that all workers reach; "" if nothing says so."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        return store.host
    return os.environ.get("MASTER_ADDR", "")


def _interface(host: str) -> str:
    """Return this machine's address on the way to `host`; for "" the loopback address."""
    if not host:
        return "127.0.0.1"
    family, kind, protocol, _, address = socket.getaddrinfo(host, _DISCARD, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
