"""What a group's training tells and asks while it runs, in whatever mode."""

from collections.abc import Callable
from dataclasses import dataclass


class Diverged(Exception):
    """The workers' parameters are not equal, by a fault of a worker or its machine, or no longer finite."""


@dataclass(slots=True, eq=False)
class Watcher:
    """What a group's training tells, and asks, while it runs."""

    progress: Callable[[float], None] = lambda share: None
    check: Callable[[], None] = lambda: None  # raises what ends the training
    bytes_sent: Callable[[], int] = lambda: 0  # by this worker to its peers, so far
