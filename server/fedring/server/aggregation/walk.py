"""The walk over a long vector, tile by tile.

Several tiles are computed at a time, with the results in order.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Executor, Future, wait
from itertools import chain
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedring.codec.encoding import TILE

T = TypeVar("T")
F = TypeVar("F", bound=np.floating[Any])
Span = tuple[int, int]


class CallersThread(Executor):
    """Leaves each span of a walk to the caller's own thread."""

    def submit(self, *_: Any, **__: Any) -> Future[Any]:
        """Return a computation that nobody begins."""
        return Future()


AHEAD = 4
"""Tiles that are being computed, or computed and not yet taken. It bounds the memory of a walk."""


def tiles(length: int) -> Iterator[Span]:
    """Yield the tiles (start, stop) that cover 0 to `length`.

    A tile has at most TILE entries.
    """
    return cut(0, length, TILE)


def cut(start: int, stop: int, step: int) -> Iterator[Span]:
    """Yield ranges of at most `step` entries, from `start` to `stop`.

    Together they cover all entries between the two.
    """
    for low in range(start, stop, step):
        yield low, min(low + step, stop)


def tiles_of(vector: NDArray[F]) -> Generator[NDArray[F], None, None]:
    """Yield a vector tile by tile."""
    return (vector[start:stop] for start, stop in tiles(len(vector)))


def in_order(executor: Executor, function: Callable[[int, int], T], spans: Iterable[Span]) -> Generator[T, None, None]:
    """Yield function(start, stop) of each span, in the order of the spans.

    The executor computes up to AHEAD of them at a time. A span that no thread has begun when its turn comes is computed
    by the caller's thread, so that a walk which itself runs on a busy executor ends nevertheless. A walk that is closed
    early waits for the computations that have begun.
    """
    pending: deque[tuple[Span, Future[T]]] = deque()
    spans = iter(spans)
    if (first := next(spans, None)) is None:
        return
    if (second := next(spans, None)) is None:  # nothing is gained by another thread, which would have to wake up
        yield function(*first)
        return
    spans = chain((first, second), spans)
    try:
        for span in spans:
            pending.append((span, executor.submit(function, *span)))
            if len(pending) > AHEAD:
                yield _take(function, *pending.popleft())
        while pending:
            yield _take(function, *pending.popleft())
    finally:
        started = [future for _, future in pending if not future.cancel()]
        wait(started)  # they read files that the caller is about to close


def gather(parts: Iterable[NDArray[Any]], out: NDArray[Any]) -> NDArray[Any]:
    """Fill `out` with the parts, one after the other, and return it."""
    start = 0
    for part in parts:
        out[start : start + len(part)] = part
        start += len(part)
    return out


def _take(function: Callable[[int, int], T], span: Span, future: Future[T]) -> T:
    return function(*span) if future.cancel() else future.result()
