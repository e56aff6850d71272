"""The process that has the links of a worker.

A fork of it takes over all objects, and the sockets to the peers, but none of the threads that move frames. What it
sent would reach peers as frames of its parent, and it would wait forever for answers. So links belong to the process
that has made them, and raise in every other one, before they take a lock: another thread may have held it at the fork.
"""

import os

from fedring.ring.errors import Forked

_here = os.getpid()  # remembered, since to ask for it takes as long as some messages


def _after_fork() -> None:
    global _here
    _here = os.getpid()


os.register_at_fork(after_in_child=_after_fork)


class Home:
    """The process in which this object is made."""

    def __init__(self) -> None:
        self._process = _here

    @property
    def is_here(self) -> bool:
        """Whether this is that process, and not a fork of it."""
        return self._process == _here

    def check(self) -> None:
        """Check that this is that process.

        Raises:
            Forked: It is a fork.
        """
        if self._process != _here:  # asked for each message, so without a call
            raise Forked(
                f"process {_here} is a fork of process {self._process}, which has used the ring: only that one can "
                "use it. Start processes that need a group of their own by spawn or forkserver, and not by fork"
            )


_first: Home | None = None  # of the first links of this process, or of one that it was forked from


def claim() -> Home:
    """Return the home of new links, which is this process.

    gRPC does not work in a fork of a process that has used it: now and then it waits forever for its threads, even if
    the links were closed before the fork.

    Raises:
        Forked: A process that this one was forked from has had links.
    """
    global _first
    if _first is None:
        _first = Home()
    _first.check()
    return _first
