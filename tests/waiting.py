"""Waiting for conditions that no event announces."""

import threading
import time
from collections.abc import Callable

SECONDS = 150.0  # longer than any machine on which the tests pass stands still


def until(condition: Callable[[], object]) -> None:
    """Return when `condition()` is true; fail the test if that takes longer than SECONDS."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)
