"""The watch over the time that operations may take."""

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from fedring.ring.engine.group import Group
from fedring.ring.engine.operation import Operation
from fedring.ring.engine.receipt import Receipt
from fedring.ring.errors import CollectiveTimeout, RingError

_TICK = 0.2  # seconds between looks at deadlines


class DeadlineWatch:
    """A thread that ends the generation once an operation's time is up.

    Args:
        groups: The groups of the generation, by id; they may change.
        lock: Guards `groups`.
        closed: Ends the thread when it is set.
        fail: Ends the generation.
    """

    def __init__(
        self,
        groups: Mapping[int, Group],
        *,
        lock: AbstractContextManager[object],
        closed: threading.Event,
        fail: Callable[[RingError], None],
    ) -> None:
        self._groups, self._lock, self._closed, self._fail = groups, lock, closed, fail
        self._thread = threading.Thread(target=self._watch, name="ring-deadlines", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(_TICK):
            now = time.monotonic()
            with self._lock:
                groups = list(self._groups.values())
            for group in groups:
                if operation := group.operations.overdue(now):
                    self._fail(_timeout(group, operation))


def _timeout(group: Group, operation: Operation | Receipt) -> CollectiveTimeout:
    """Return the error of an operation whose time is up.

    It names the rank that the operation waits for.
    """
    limit = f"for {operation.what} within the timeout of {operation.timeout:g} s"
    if (rank := operation.waiting_for) is None:
        return CollectiveTimeout(f"peers took nothing {limit}")
    sent = group.operations.sent_instead(rank)
    instead = f"; it runs {sent}, which rank {group.rank} has not started" if sent else ""
    return CollectiveTimeout(f"rank {rank} sent nothing {limit}{instead}", rank=rank)
