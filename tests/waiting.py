"""Waiting for what comes without an event that tells of it."""

import threading
import time
from collections.abc import Callable

SECONDS = 60.0


def until(true: Callable[[], object]) -> None:
    """It has become true; fails if it does not within a minute."""
    deadline = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)
