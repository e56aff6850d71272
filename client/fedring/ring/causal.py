"""Keys of operations that do not depend on the order in which threads happen to run.

Ranks must call one operation by one name. Counting calls works as long as every rank makes them in one order, and
callbacks of futures do not: a hook such as PowerSGD starts the next collective in the callback of the one before, and
which bucket's callback runs first differs between ranks. So an operation that is started in a callback is named by its
cause: the operation whose callback it is, the callback's place, and the operation's own place in the callback.
"""

import hashlib
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

MAX_KEY = 64  # characters
_MAX_PATH = 44

_local = threading.local()


class Scope:
    """The place of a callback in its cause; names what the callback starts, in order."""

    def __init__(self, path: str) -> None:
        # a long chain of callbacks has a long path, and frames have little room: its hash names it as well
        self._path = path if len(path) <= _MAX_PATH else hashlib.sha256(path.encode()).hexdigest()[:32]
        self._operations = itertools.count()
        self._callbacks = itertools.count()

    def operation(self) -> str:
        """The key of the next operation that the callback starts."""
        return f"{self._path}.{next(self._operations)}"

    def callback(self) -> "Scope":
        """The scope of the next callback on the same future."""
        return Scope(f"{self._path}/{next(self._callbacks)}")


@contextmanager
def inside(scope: Scope) -> Iterator[None]:
    """Operations that this thread starts meanwhile are named by `scope`."""
    outer = getattr(_local, "scope", None)
    _local.scope = scope
    try:
        yield
    finally:
        _local.scope = outer


def next_key(counted: Callable[[], int]) -> str:
    """The key of an operation that starts on this thread now; outside callbacks, a number from `counted`."""
    scope: Scope | None = getattr(_local, "scope", None)
    return scope.operation() if scope else str(counted())
