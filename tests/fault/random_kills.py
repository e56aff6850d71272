"""Settings of the tests that kill servers at random moments."""

import threading

LONGEST = 0.2  # seconds until the next kill, at most
KEEP_ALL = {"keep_models": 10_000, "keep_update_rounds": 10_000}


def wait(seconds: float) -> None:
    threading.Event().wait(seconds)
