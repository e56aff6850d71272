"""The walk over a long vector: tile by tile, several at work, all in order."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Executor, Future, wait
from typing import Any, TypeVar

from numpy.typing import NDArray

from fedring.codec.encoding import TILE

T = TypeVar("T")
Span = tuple[int, int]

AHEAD = 4
"""Tiles that are at work, or done and not yet taken: the bound of a walk's memory."""


def tiles(length: int) -> Iterator[Span]:
    """The ranges (start, stop) of at most TILE entries that make up 0..length."""
    return cut(0, length, TILE)


def cut(start: int, stop: int, step: int) -> Iterator[Span]:
    """The ranges of at most `step` entries that make up start..stop."""
    for low in range(start, stop, step):
        yield low, min(low + step, stop)


def in_order(executor: Executor, function: Callable[[int, int], T], spans: Iterable[Span]) -> Generator[T, None, None]:
    """function(start, stop) for each span, in order, AHEAD at a time on the executor.

    A span that no thread has begun when its turn comes is computed here, so that
    a walk that itself runs on a busy executor ends all the same.
    """
    pending: deque[tuple[Span, Future[T]]] = deque()
    try:
        for span in spans:
            pending.append((span, executor.submit(function, *span)))
            if len(pending) > AHEAD:
                yield _take(function, *pending.popleft())
        while pending:
            yield _take(function, *pending.popleft())
    finally:
        started = [future for _, future in pending if not future.cancel()]
        wait(started)  # they read what the caller is about to close


def gather(parts: Iterable[NDArray[Any]], out: NDArray[Any]) -> NDArray[Any]:
    """`out`, filled with the parts, one after the other."""
    start = 0
    for part in parts:
        out[start : start + len(part)] = part
        start += len(part)
    return out


def _take(function: Callable[[int, int], T], span: Span, future: Future[T]) -> T:
    return function(*span) if future.cancel() else future.result()
