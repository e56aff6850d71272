"""Waiting for conditions that no event announces."""

import threading
import time
from collections.abc import Callable

SECONDS = 60.0


def until(condition: Callable[[], object]) -> None:
    """Return when `condition()` is true; fail the test if that takes longer than SECONDS."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)
