"""The rendezvous of workers, at the start and after a loss.

They find each other by addresses that a server hands out, or through torch's store as in init_process_group.

torch calls `create` to make every group.
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

from fedring.c10d import HashStore, PrefixStore, Store, TCPStore
from fedring.ring.engine import collectives
from fedring.ring.engine.endpoint import Endpoint
from fedring.ring.engine.home import claim
from fedring.ring.errors import RingError
from fedring.ring.options import RingOptions
from fedring.ring.torch.forming import next_generation
from fedring.ring.torch.meeting import Meeting, Membership, Terms, store_is_gone
from fedring.ring.torch.member import WIRE_DTYPES
from fedring.ring.torch.process_group import RingProcessGroup
from fedring.ring.torch.world import World, current, set_current

_COLLECTIVE = timedelta(minutes=30)  # torch's own default
_LAST_CALL = timedelta(seconds=30)  # as for torchrun's last_call_timeout
_DISCARD = 9  # any port would do: nothing is sent


@dataclass(frozen=True, slots=True, eq=False)
class Seat:
    """A place in a world whose addresses are known."""

    endpoint: Endpoint
    members: Sequence[str]  # the addresses of all ranks
    timeout: float  # seconds that the other ranks may take to come


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """The parameters of this worker's newest default group from a store.

    With them it can form the group again.
    """

    meeting: Meeting
    store: Store  # as it was given
    terms: Terms


_joined: Endpoint | None = None
_place: _Place | None = None
_lock = threading.Lock()


def join(
    endpoint: Endpoint, *, rank: int, members: Sequence[str], timeout: float, identities: Sequence[str] = ()
) -> None:
    """Form torch's default group of workers with known addresses.

    When this returns, all members have come, and know that all have.

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
    if dist.is_initialized():
        raise RingError("there is a default group already: leave it before joining another")
    if endpoint.options.tls_members_only and len(identities) != len(members):
        raise RingError("the server does not name the members' identities: update it")
    # Streams wait in the listener until the members are known, so this comes before any peer is awaited.
    endpoint.members.expect(dict(zip(members, identities, strict=False)))
    _form(HashStore(), Seat(endpoint, members, timeout), rank=rank, timeout=_COLLECTIVE)


def rejoin(
    store: Store | None = None,
    *,
    slot: int | None = None,
    size: int | None = None,
    min_size: int | None = None,
    step: int = 0,
    timeout: timedelta = _COLLECTIVE,
    last_call_timeout: timedelta = _LAST_CALL,
    options: RingOptions | None = None,
) -> None:
    """Form torch's default group from the workers that are there.

    To be called at the start, and after a loss.

    The default group of before is destroyed first, with its subgroups. When this returns, all members have come, and
    know that all have. If a member is lost while the group forms, the next one is formed. Afterwards rank 0 has the
    newest state: ranks follow from who was a member before, the finished steps, and the slots, in this order.

    Values that are not given are as in the last call, or in `init_process_group`; in the first call they come from the
    variables MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE.

    Args:
        store: A store that outlives the workers.
        slot: This worker's slot. A replacement has the slot of the worker that it replaces.
        size: The number of slots.
        min_size: How many workers are enough if the other slots stay empty; in the first call, by default all.
        step: How many steps of the training this worker has finished.
        timeout: How long to wait for the group, and how long each of its collectives may take.
        last_call_timeout: How long workers wait for empty slots before `min_size` workers are enough.
        options: The options of this worker's links.

    Raises:
        PeerLost: A slot has stayed empty.
        RingError: Another worker has this worker's slot, workers of the last generation still run, or the store is
            gone.
        Forked: A process that this one was forked from has had a group.
    """
    global _place
    claim()
    place = _place = _next_place(
        store, slot, size, min_size, last_call=last_call_timeout, timeout=timeout, options=options
    )
    leave()
    deadline = time.monotonic() + timeout.total_seconds()

    def form(endpoint: Endpoint, membership: Membership, seconds: float) -> None:
        prefixed = PrefixStore(f"generation/{membership.generation}", place.store)
        rank = membership.addresses.index(endpoint.address)
        _form(prefixed, Seat(endpoint, membership.addresses, seconds), rank=rank, timeout=timeout)

    next_generation(place.meeting, place.terms, form, step=step, deadline=deadline)


def waiting() -> int:
    """Return how many workers wait to join the default group.

    They have slots that the default group does not fill.

    A group that has shrunk can take them in: all its ranks call `rejoin` after the same step. Ranks that ask may get
    different answers, so let one ask and tell the others.

    Raises:
        RingError: The default group was not formed through a store, or the store is gone.
        Forked: A process that this one was forked from has had a group.
    """
    claim()
    if _place is None:
        raise RingError("this worker has not met others through a store")
    try:
        return _place.meeting.waiting(_place.terms.size)
    except dist.DistNetworkError as error:
        raise RingError(store_is_gone(_place.store)) from error


def failure() -> RingError | None:
    """Return the error that has ended the default group.

    It is None if the group works, or if there is none.

    With it a script tells the loss of a peer, which torch's C++ code raises as a plain RuntimeError, from its own
    errors.
    """
    world = current()
    return world.endpoint.failure if world is not None else None


def leave() -> None:
    """Leave torch's default group, and close its endpoint.

    This never hangs, whatever has failed before.
    """
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
        RingError: The members have not come in time, or the generation has failed.
        Forked: A process that this one was forked from has had a group.
    """
    claim()
    ranks = list(wanted.global_ranks_in_group)
    world = current() if ranks else None
    if world is not None:
        return _group(world, wanted, ranks, options)
    if isinstance(options, Seat):
        world = World(options.endpoint, options.members)
        group = _enter(world, wanted, options, options.timeout)
    else:
        world, group = meet(wanted, options or RingOptions(), default=not ranks)
    if not ranks:
        set_current(world)
    return group


def meet(wanted: Any, options: RingOptions, *, default: bool) -> tuple[World, RingProcessGroup]:
    """Form a world of the workers that use one store.

    The store comes from env://, tcp:// or file://. Returns the world, and a group of all its workers.

    If a worker that has come is lost before all are connected, wait for another one in its place. After a restart by
    torchrun this is a worker of the attempt before.

    Args:
        wanted: torch's description of the group.
        options: The options of this worker's links.
        default: Whether it is the default group, which `rejoin` forms again.

    Raises:
        PeerLost: A rank has not come in time; the error names it.
    """
    global _place
    store, seconds = wanted.store, wanted.timeout.total_seconds()
    terms = Terms(wanted.group_rank, wanted.group_size, wanted.group_size, seconds, seconds)
    meeting = Meeting(store, _with_listen(options, store))
    deadline = time.monotonic() + seconds

    def form(endpoint: Endpoint, membership: Membership, seconds: float) -> tuple[World, RingProcessGroup]:
        world = World(endpoint, membership.addresses)
        try:
            group = _enter(world, wanted, options, seconds)
            # The neighbours' streams are open; only the barrier shows that all members have come.
            barrier = collectives.barrier(*group.place)
            group.ring.start("meeting", barrier, timeout=seconds, key="meeting").wait()
        except BaseException:
            world.close()
            raise
        return world, group

    formed = next_generation(meeting, terms, form, step=0, deadline=deadline)
    if default:
        _place = _Place(meeting, store, terms)
    return formed


def _enter(world: World, wanted: Any, options: Any, seconds: float) -> RingProcessGroup:
    """Enter a group of all members of a new world.

    If they do not come in time, the world is closed.
    """
    try:
        group = _group(world, wanted, range(len(world.members)), options)
        world.endpoint.wait_until_matched(group.ring, timeout=seconds)
    except RingError:
        world.close()
        raise
    return group


def _form(store: Store, seat: Seat, *, rank: int, timeout: timedelta) -> None:
    """Form torch's default group of workers with known addresses.

    If that fails, the endpoint is closed.
    """
    global _joined
    with _lock:
        _joined = seat.endpoint
    hook = sys.excepthook
    try:
        dist.init_process_group(
            "fedring", store=store, rank=rank, world_size=len(seat.members), timeout=timeout, pg_options=seat
        )
        group: Any = dist.group.WORLD  # whose method takes a timeout, as dist.barrier() does from torch 2.13 on only
        group.barrier(timeout=timedelta(seconds=seat.timeout)).wait()
    except BaseException:
        leave()
        raise
    finally:
        sys.excepthook = hook  # torch wraps another one around it for every group


def _next_place(
    store: Store | None,
    slot: int | None,
    size: int | None,
    min_size: int | None,
    *,
    last_call: timedelta,
    timeout: timedelta,
    options: RingOptions | None,
) -> _Place:
    """Return where and with whom to form the next default group.

    Values that are not given are as before.
    """
    before = _place
    if before is None or (store is not None and store is not before.store):
        store = store if store is not None else _store_of_environment(timeout)
        meeting = Meeting(PrefixStore("fedring", store), _with_listen(options or RingOptions(), store))
    else:
        store, meeting = before.store, before.meeting
        if options is not None:
            meeting.options = _with_listen(options, store)
    # A first call takes the slot and the size from the variables of the launcher; every later one remembers them.
    terms = before.terms if before is not None else None
    if slot is None:
        slot = terms.slot if terms else int(_variable("RANK"))
    if size is None:
        size = terms.size if terms else int(_variable("WORLD_SIZE"))
    if min_size is None:
        min_size = terms.min_size if terms and terms.size == size else size
    return _Place(meeting, store, Terms(slot, size, min_size, last_call.total_seconds(), timeout.total_seconds()))


def _store_of_environment(timeout: timedelta) -> Store:
    """Connect to the TCPStore at MASTER_ADDR and MASTER_PORT.

    Another process hosts it.
    """
    host, port = _variable("MASTER_ADDR"), int(_variable("MASTER_PORT"))
    try:
        return TCPStore(host, port, None, False, timeout, wait_for_workers=False)
    except dist.DistNetworkError as error:
        raise RingError(
            f"no store answers at MASTER_ADDR:MASTER_PORT, {host}:{port}: start one with `flctl store`"
        ) from error


def _variable(name: str) -> str:
    if not (value := os.environ.get(name)):
        raise RingError(f"rejoin needs a store, a slot and a size: give them, or set {name} in the environment")
    return value


def _group(world: World, wanted: Any, ranks: Sequence[int], options: Any) -> RingProcessGroup:
    group = RingProcessGroup(world, wanted.store, ranks, name=wanted.group_id, timeout=wanted.timeout)
    own = options if isinstance(options, RingOptions) else world.endpoint.options
    group.wire = WIRE_DTYPES[own.wire_dtype]
    return group


def _with_listen(options: RingOptions, store: Store) -> RingOptions:
    """Return the options with a place to listen.

    By default it is the interface from which the store is reached.
    """
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
    """Return this machine's address on the way to `host`.

    For "" it is the loopback address.
    """
    if not host:
        return "127.0.0.1"
    family, kind, protocol, _, address = socket.getaddrinfo(host, _DISCARD, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
