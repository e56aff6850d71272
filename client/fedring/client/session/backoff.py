"""How long to wait before the next try."""

import random

FIRST_SECONDS = 0.2
MOST_SECONDS = 5.0


class Backoff:
    """Random waits below a limit that doubles with each failure.

    This is "full jitter", so that clients spread out.
    """

    def __init__(self) -> None:
        self._limit = FIRST_SECONDS

    def next(self) -> float:
        """Return the seconds to wait, and double the limit.

        The limit stays at most MOST_SECONDS.
        """
        seconds = random.uniform(0, self._limit)
        self._limit = min(MOST_SECONDS, 2 * self._limit)
        return seconds

    def reset(self) -> None:
        """Start again from the shortest limit."""
        self._limit = FIRST_SECONDS
