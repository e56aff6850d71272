"""Works and futures of collectives that run.

torch.distributed hands them out. A future's callbacks may start collectives.

Callbacks run on threads of a pool that grows, never on the thread that attaches them. So a callback that waits for
another collective keeps nobody waiting, and ranks may attach theirs in different orders. Each callback runs in a scope,
so that what it starts has one name on all ranks, also in chains of `then` (see `engine.operation.CallbackScope`).
"""

import copy
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist
from torch.futures import Future

from fedring.ring.engine.group import Group
from fedring.ring.engine.home import Home
from fedring.ring.engine.operation import CallbackScope, Operation, inside
from fedring.ring.errors import CollectiveTimeout, RingError
from fedring.ring.torch.compiler import opaque

log = logging.getLogger(__name__)

_SPARE_SECONDS = 10.0  # after so long without work a thread of the pool ends


@opaque
class RingWork(dist.Work):
    """Operations that end together.

    Args:
        group: The group in which they run.
        operations: The operations.
        results: The result of `result`: the tensors that hold the received values.
        finish: Called once after all have ended, by the first caller that asks; stores received values in the tensors.
    """

    def __init__(
        self,
        group: Group,
        operations: Sequence[Operation],
        results: list[Any],
        *,
        finish: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self.operations = operations
        self._group = group
        self._results = results
        self._finish = finish
        self._lock = threading.Lock()
        self._future: RingFuture | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until the work has ended. Return True.

        Args:
            timeout: How long to wait; 0 = as long as the operations may take.

        Raises:
            CollectiveTimeout: It has not ended within the timeout. That ends the generation.
            RingError: The error that it ended with.
            Forked: This process is a fork of the worker.
        """
        self._group.home.check()
        seconds = timeout.total_seconds()
        try:
            for operation in self.operations:
                if not operation.wait(seconds if seconds > 0 else None):
                    what = f"{operation.what} has not ended within the timeout of {seconds:g} s"
                    raise self.failed(CollectiveTimeout(what, rank=operation.waiting_for))
        except RingError as error:
            # The caller gets its tensors back with the error, so no operation may write to them any more.
            self._stop(self.exception() or error)
            raise
        self.synchronize()
        return True

    def _stop(self, error: RingError) -> None:
        """Give the memory of all tensors back to the caller."""
        for operation in self.operations:
            operation.stop(error)

    def failed(self, error: RingError) -> RingError:
        """End the generation with an error, and return the error."""
        self._group.fail(error)
        return error

    def synchronize(self) -> None:
        """Store received values in the tensors, if not yet done.

        Raises:
            BadFrame: A rank has sent values that cannot be stored. That ends the generation.
        """
        if self._finish is None:
            return
        try:
            with self._lock:
                if self._finish is not None:
                    self._finish()
                # Only now: whoever asks again after an error must not take the tensors for results.
                self._finish = None
        except RingError as error:
            self.failed(error)
            raise

    def is_completed(self) -> bool:
        """Return whether it has ended, with or without an error."""
        self._group.home.check()
        if not all(operation.done for operation in self.operations):
            return False
        error = self.exception()
        if error is None:
            self.synchronize()
        else:
            self._stop(error)
        return True

    def is_success(self) -> bool:
        """Return whether it has ended without an error."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> RingError | None:
        """Return the error that it ended with, if there is one."""
        return next((operation.error for operation in self.operations if operation.error), None)

    def result(self) -> list[Any]:
        """Return the tensors with the received values."""
        return self._results

    def get_future(self) -> "RingFuture":
        """Return a future of the result."""
        self._group.home.check()
        with self._lock:
            if self._future is not None:
                return self._future
            self._future, complete = deferred(self.operations[0].key, self._value)
        _when_all_done(self.operations, complete)
        return self._future

    def _value(self) -> list[Any]:
        self.wait()
        return self._results


def together(group: Group, works: Sequence[RingWork]) -> RingWork:
    """Return one work for several."""

    def finish() -> None:
        for work in works:
            work.synchronize()

    operations = [operation for work in works for operation in work.operations]
    return RingWork(group, operations, [result for work in works for result in work.result()], finish=finish)


class FailedValue:
    """A value that raises an error when it is used.

    It stands in a future that has failed.

    torch gives Python no way to fail a future.
    """

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def copied_error(self) -> BaseException:
        """Return a copy of the error, to be raised.

        A raised error holds, by its traceback, the frames of those who wait, and in them DDP with its hooks. If the
        future held that error, and they the future, that would be a circle through C++ that nothing collects.
        """
        try:
            error = copy.copy(self.error)
        except TypeError:  # its class takes other arguments than it keeps
            return self.error
        error.__cause__ = self.error
        return error

    def __getitem__(self, index: Any) -> NoReturn:
        raise self.copied_error()

    def __str__(self) -> str:  # DDP calls it when a hook's result is not a tensor
        raise self.copied_error()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:  # DDP calls it when it looks for tensors in a result
        raise self.copied_error()


@opaque
class RingFuture(Future[Any]):
    """A future of a function's result, whose callbacks run in `scope`."""

    def __init__(self, scope: CallbackScope) -> None:
        super().__init__()
        self._home = Home()  # forks have none of the threads that would complete it
        self._scope = scope

    def complete(self, function: Callable[[], Any]) -> None:
        """End the future with the result or the error of `function`."""
        try:
            result = function()
        except BaseException as error:  # noqa: BLE001  # raised again for those who wait
            result = FailedValue(error)
        self.set_result(result)

    def then(self, callback: Callable[[Any], Any]) -> "RingFuture":
        """Return a future of the callback's result.

        The callback is called with this future once that has ended. If it raises, the new future fails with its error.
        """
        scope = self._scope.next_callback()
        after = RingFuture(scope)

        def call() -> Any:
            with inside(scope):
                return callback(self)

        self._attach(lambda: after.complete(call))
        return after

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call `callback` with this future once that has ended.

        An error of the callback is logged.
        """
        scope = self._scope.next_callback()

        def call() -> None:
            try:
                with inside(scope):
                    callback(self)
            except Exception:  # nobody waits for what it returns
                log.exception("a callback has failed")

        self._attach(call)

    def wait(self) -> Any:
        """Wait for the value, and return it.

        If the future has failed, this raises its error.
        """
        self._home.check()
        return _value(super().wait())

    def value(self) -> Any:
        """Return the value, which must be there.

        If the future has failed, this raises its error.
        """
        return _value(super().value())

    def _attach(self, call: Callable[[], None]) -> None:
        """Call `call` at the end, on another thread.

        If the future has ended, torch would call at once, on this thread.
        """
        self._home.check()
        attaching = threading.get_ident()

        def ended(_: Any) -> None:
            if threading.get_ident() == attaching:
                _pool.run(call)
            else:
                call()

        super().add_done_callback(ended)
        attaching = 0


def deferred(path: str, function: Callable[[], Any]) -> tuple[RingFuture, Callable[[], None]]:
    """Return a future, and a function that completes it.

    That function has `function` called on a thread of the pool.

    Args:
        path: The key of the operation that the future belongs to.
        function: Called once.
    """
    future = RingFuture(CallbackScope(path))
    return future, lambda: _pool.run(lambda: future.complete(function))


def _value(value: Any) -> Any:
    if isinstance(value, FailedValue):
        raise value.copied_error()
    return value


def _when_all_done(operations: Sequence[Operation], callback: Callable[[], None]) -> None:
    """Call `callback` once, when the last of the operations has ended."""
    if len(operations) == 1:
        operations[0].when_done(callback)
        return
    left, lock = len(operations), threading.Lock()

    def one_done() -> None:
        nonlocal left
        with lock:
            left -= 1
            last = left == 0
        if last:
            callback()

    for operation in operations:
        operation.when_done(one_done)


class Pool:
    """Threads that grow in number whenever all are busy.

    A ThreadPoolExecutor would not do: the interpreter joins its threads at the end, and a callback that waits for a
    lost peer would keep the process alive. These threads are daemons.

    Args:
        name: The name of its threads.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._spare = 0  # threads that wait for work, less the tasks that wait for a thread

    def run(self, task: Callable[[], None]) -> None:
        """Run a task on a thread that begins with it at once."""
        with self._lock:
            grow = self._spare == 0
            if not grow:
                self._spare -= 1
        self._tasks.put(task)
        if grow:
            threading.Thread(target=self._work, name=self._name, daemon=True).start()

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


_pool = Pool("ring-callbacks")
