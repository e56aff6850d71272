"""What torch.distributed hands out for a collective that runs."""

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fedring.ring.errors import CollectiveTimeout, RingError
from fedring.ring.futures import RingFuture, deferred
from fedring.ring.group import Group
from fedring.ring.operation import Operation


class RingWork(dist.Work):
    """Operations that end together, and what is done once when they have: `finish` stores what came."""

    def __init__(
        self,
        group: Group,
        operations: Sequence[Operation],
        results: list[Any],
        *,
        finish: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._group = group
        self.operations = operations
        self._results = results
        self._finish = finish
        self._lock = threading.Lock()
        self._future: RingFuture | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """True once it has ended, well; raises the RingError that it ended with."""
        seconds = timeout.total_seconds()
        for operation in self.operations:
            if not operation.wait(seconds if seconds > 0 else None):
                what = f"{operation.what} has not ended within the timeout of {seconds:g} s"
                raise self.failed(CollectiveTimeout(what, rank=operation.waiting_for))
        self.synchronize()
        return True

    def failed(self, error: RingError) -> RingError:
        """The error, with which the generation has ended."""
        self._group.fail(error)
        return error

    def synchronize(self) -> None:
        """The tensors hold what came, if it has come."""
        if self._finish is None:
            return
        with self._lock:
            finish, self._finish = self._finish, None
            if finish is not None:
                finish()

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        if not all(operation.done for operation in self.operations):
            return False
        if self.exception() is None:
            self.synchronize()
        return True

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> RingError | None:
        """What it ended with, if that is an error."""
        return next((operation.error for operation in self.operations if operation.error), None)

    def result(self) -> list[Any]:
        """The tensors that hold what came."""
        return self._results

    def get_future(self) -> RingFuture:
        """A future of the result."""
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
    """Several works as one."""

    def finish() -> None:
        for work in works:
            work.synchronize()

    operations = [operation for work in works for operation in work.operations]
    return RingWork(group, operations, [result for work in works for result in work.result()], finish=finish)


def _when_all_done(operations: Sequence[Operation], callback: Callable[[], None]) -> None:
    """`callback` is called once, when the last of them has ended."""
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
