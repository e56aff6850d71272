"""A worker's place among its peers: one endpoint, shared by the default group and its subgroups."""

import atexit
import threading
from collections.abc import Sequence

from fedring.ring.endpoint import Endpoint
from fedring.ring.errors import RingError
from fedring.ring.group import Group
from fedring.ring.link import Traffic


class World:
    """An endpoint and the addresses of all ranks; closed with the last of its groups."""

    def __init__(self, endpoint: Endpoint, members: Sequence[str]) -> None:
        self.endpoint = endpoint
        self.members = list(members)
        self._lock = threading.Lock()
        self._groups: list[Group] = []

    def enter(self, name: str, ranks: Sequence[int]) -> Group:
        """This worker's side of a group of ranks of the world."""
        members = [self.members[rank] for rank in ranks]
        if self.endpoint.address not in members:
            raise RingError(f"this worker is none of the ranks {list(ranks)}")
        group = self.endpoint.group(name, rank=members.index(self.endpoint.address), members=members)
        with self._lock:
            self._groups.append(group)
        return group

    def leave(self, group: Group) -> None:
        """The group is no more."""
        with self._lock:
            if group not in self._groups:
                return
            self._groups.remove(group)
            last = not self._groups
        self.endpoint.forget(group)
        if last:
            self.close()

    def close(self) -> None:
        """The worker has left its peers, in order unless the generation had failed."""
        self.endpoint.close()
        _forget(self)


_lock = threading.Lock()
_current: World | None = None
_past = Traffic()  # of the newest world that has ended
_before = Traffic()  # of all before it


def set_current(world: World) -> None:
    """Subgroups belong to `world` until it is closed."""
    global _current
    with _lock:
        _current = world


@atexit.register
def _leave_at_exit() -> None:
    """Whoever forgets destroy_process_group leaves in order, too; gRPC alone would take seconds to give up."""
    if _current is not None:
        _current.close()


def current() -> World | None:
    """The world of the default group."""
    return _current


def traffic() -> Traffic:
    """What has gone over the streams of the default group and its subgroups, or over those of the last one."""
    world = _current
    return world.endpoint.traffic if world is not None else _past


def total_traffic() -> Traffic:
    """What has gone over the streams of all default groups of this process, and of their subgroups."""
    with _lock:
        ended = _before + _past
        return ended + _current.endpoint.traffic if _current is not None else ended


def _forget(world: World) -> None:
    global _current, _past, _before
    with _lock:
        if _current is world:
            _before += _past
            _current, _past = None, world.endpoint.traffic
