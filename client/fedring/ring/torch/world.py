"""A worker's endpoint, shared by the default group and its subgroups."""

import atexit
import gc
import os
import threading
from collections.abc import Sequence
from weakref import WeakSet

from fedring.ring.engine.endpoint import Endpoint
from fedring.ring.engine.group import Group
from fedring.ring.errors import RingError
from fedring.ring.transport.interface import Traffic


class World:
    """An endpoint, and the addresses of all ranks.

    It is closed with the last of its groups.
    """

    def __init__(self, endpoint: Endpoint, members: Sequence[str]) -> None:
        self.endpoint = endpoint
        self.members = list(members)
        self._lock = threading.Lock()
        self._groups: list[Group] = []
        _worlds.add(self)

    def enter(self, name: str, ranks: Sequence[int]) -> Group:
        """Enter a group of ranks of this world, this worker's among them.

        Raises:
            RingError: This worker is none of the ranks, or `Endpoint.group` refuses.
        """
        members = [self.members[rank] for rank in ranks]
        if self.endpoint.address not in members:
            raise RingError(f"this worker, {self.endpoint.address}, is none of the ranks {list(ranks)}")
        group = self.endpoint.group(name, rank=members.index(self.endpoint.address), members=members)
        with self._lock:
            self._groups.append(group)
        return group

    def leave(self, group: Group) -> None:
        """Leave a group, and with the last one the world.

        A fork of the worker only forgets the world.
        """
        if not self.endpoint.home.is_here:
            self.close()
            return
        with self._lock:
            if group not in self._groups:
                return
            self._groups.remove(group)
            last = not self._groups
        self.endpoint.forget(group)
        if last:
            self.close()

    def close(self) -> None:
        """Leave all peers, in order unless the generation has failed."""
        self.endpoint.close()
        _forget(self)


_lock = threading.Lock()
_worlds: "WeakSet[World]" = WeakSet()
_current: World | None = None
_past = Traffic()  # of the newest world that has ended
_before = Traffic()  # of all before it


def set_current(world: World) -> None:
    """Make `world` the default group's world.

    Subgroups belong to it until it is closed.
    """
    global _current
    with _lock:
        _current = world


# A fork, such as a worker of a DataLoader, has none of gRPC's threads. It would wait for them forever if it freed a
# channel or a server that is garbage by then. So garbage that a fork takes over is never collected there, and what is
# in use is kept until its end. Another thread may hold the lock at the fork, and would never let go of it there.
_kept: list[World] = []


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    gc.freeze()
    _kept.extend(_worlds)


os.register_at_fork(after_in_child=_after_fork)


@atexit.register
def _leave_at_exit() -> None:
    """Leave all worlds in order when the process exits.

    gRPC alone would take seconds to give up, or wait forever for its threads.
    """
    for world in list(_worlds):
        world.close()


def current() -> World | None:
    """Return the world of the default group."""
    return _current


def traffic() -> Traffic:
    """Return the counters of the default group and its subgroups.

    Without a default group they are those of the last one.
    """
    world = _current
    return world.endpoint.traffic if world is not None else _past


def total_traffic() -> Traffic:
    """Return the sum of the counters of all default groups.

    Subgroups are included.
    """
    with _lock:
        ended = _before + _past
        return ended + _current.endpoint.traffic if _current is not None else ended


def _forget(world: World) -> None:
    global _current, _past, _before
    with _lock:
        if _current is world:
            _before += _past
            _current, _past = None, world.endpoint.traffic
