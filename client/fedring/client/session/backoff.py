"""How long to wait before the next try."""

import random

FIRST_SECONDS = 0.2
MOST_SECONDS = 5.0


class Backoff:
    """Full jitter: a random share of a ceiling that doubles, so that a fleet does not come at once."""

    def __init__(self) -> None:
        self._ceiling = FIRST_SECONDS

    def next(self) -> float:
        """Seconds to wait now."""
        seconds = random.uniform(0, self._ceiling)
        self._ceiling = min(MOST_SECONDS, 2 * self._ceiling)
        return seconds

    def reset(self) -> None:
        """Start again from the shortest wait."""
        self._ceiling = FIRST_SECONDS
