"""Futures whose callbacks may start collectives.

Callbacks run on threads of a pool that grows, never on the one that attaches them: one that waits for another
collective keeps nobody waiting, and ranks may attach theirs in different orders. Each runs in a causal scope, so that
what it starts has one name on all ranks (see causal.py), also in chains of `then`.
"""

import copy
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from torch.futures import Future

from fedring.ring.causal import Scope, inside

log = logging.getLogger(__name__)

_SPARE_SECONDS = 10.0  # a thread of the pool without work ends


class Failure:
    """Stands where a value would be: torch gives Python no way to fail a future. It raises as soon as it is used."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def again(self) -> BaseException:
        """The error, to be raised: a copy.

        What is raised holds, by its traceback, the frames of those who wait, and in them DDP with its hooks. A future
        that held it would be held by them, in a circle through C++ that nothing collects.
        """
        try:
            error = copy.copy(self.error)
        except TypeError:  # its class wants other arguments than it keeps
            return self.error
        error.__cause__ = self.error
        return error

    def __getitem__(self, index: Any) -> NoReturn:
        raise self.again()

    def __str__(self) -> str:  # DDP, when a hook's result is no tensor
        raise self.again()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:  # DDP, when it looks for tensors in a result
        raise self.again()


class RingFuture(Future[Any]):
    """A future of what a function returns or raises."""

    def __init__(self, scope: Scope) -> None:
        super().__init__()
        self._scope = scope

    def complete(self, function: Callable[[], Any]) -> None:
        """The future has ended with what `function` returns or raises."""
        try:
            result = function()
        except BaseException as error:  # noqa: BLE001  # whoever waits gets it
            result = Failure(error)
        self.set_result(result)

    def then(self, callback: Callable[[Any], Any]) -> "RingFuture":
        """A future of what `callback` returns or raises; it is called with this one, once this one has ended."""
        scope = self._scope.callback()
        after = RingFuture(scope)

        def call() -> Any:
            with inside(scope):
                return callback(self)

        self._attach(lambda: after.complete(call))
        return after

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """`callback` is called with this future, once this one has ended; what it raises is logged."""
        scope = self._scope.callback()

        def call() -> None:
            try:
                with inside(scope):
                    callback(self)
            except Exception:  # nobody waits for what it returns
                log.exception("a callback has failed")

        self._attach(call)

    def wait(self) -> Any:
        """The value, as soon as it is there; raises what the future ended with."""
        return _value(super().wait())

    def value(self) -> Any:
        """The value, which must be there; raises what the future ended with."""
        return _value(super().value())

    def _attach(self, call: Callable[[], None]) -> None:
        """torch would call at once, here, if the future has ended."""
        attaching = threading.get_ident()

        def ended(_: Any) -> None:
            if threading.get_ident() == attaching:
                _pool.run(call)
            else:
                call()

        super().add_done_callback(ended)
        attaching = 0


def deferred(path: str, function: Callable[[], Any]) -> tuple[RingFuture, Callable[[], None]]:
    """A future of what `function` returns or raises, and what has it called on a thread of the pool.

    `path` is the key of the operation that is the cause.
    """
    future = RingFuture(Scope(path))
    return future, lambda: _pool.run(lambda: future.complete(function))


def _value(value: Any) -> Any:
    if isinstance(value, Failure):
        raise value.again()
    return value


class _Pool:
    """Threads that grow in number whenever all are busy."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._spare = 0  # threads that wait for a task which nobody has promised them yet

    def run(self, task: Callable[[], None]) -> None:
        """A thread begins with the task at once."""
        with self._lock:
            grow = self._spare == 0
            if not grow:
                self._spare -= 1
        self._tasks.put(task)
        if grow:
            threading.Thread(target=self._work, name="ring-callbacks", daemon=True).start()

    def _work(self) -> None:
        while (task := self._next()) is not None:
            try:
                task()
            except Exception:  # a thread that ended here would leave its place in the pool empty
                log.exception("a callback has failed")
            with self._lock:
                self._spare += 1

    def _next(self) -> Callable[[], None] | None:
        while True:
            try:
                return self._tasks.get(timeout=_SPARE_SECONDS)
            except queue.Empty:
                with self._lock:
                    if self._spare > 0:
                        self._spare -= 1
                        return None


_pool = _Pool()
