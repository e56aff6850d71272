"""Waiting on the main thread, with signals handled meanwhile.

The system may give a signal to any thread of a process. Python then runs the signal's handler on the main thread, but
does not interrupt a wait of the main thread. So the main thread never waits for long at a time.
"""

from concurrent.futures import Future
from threading import Event
from typing import TypeVar

T = TypeVar("T")
_LOOK_SECONDS = 0.5


def wait(event: Event) -> None:
    """Wait for an event, and handle signals meanwhile."""
    while not event.wait(_LOOK_SECONDS):
        pass


def result_of(future: "Future[T]") -> T:
    """Wait for a future, and handle signals meanwhile.

    Returns:
        Its result; an exception of the future is raised.
    """
    while True:
        try:
            return future.result(_LOOK_SECONDS)
        except TimeoutError:
            if future.done():  # the error is its own, or it has ended just now
                return future.result()
