"""How long clients take to come back: what it is worth to wait for one that was lost."""

from collections import deque
from math import isfinite

MOST_SECONDS = 600.0
"""A client that is away for longer was not restarted: it says nothing of how long that takes."""
_NEWEST = 64  # that count


class Returns:
    """The newest absences that ended, and what clients say of their starts; monotonic seconds."""

    def __init__(self) -> None:
        self._gone: dict[str, float] = {}  # since when, of those that are away
        self._seconds: deque[float] = deque(maxlen=_NEWEST)

    @property
    def slowest(self) -> float:
        """The longest of them in seconds, 0 if nothing is known."""
        return max(self._seconds, default=0.0)

    def left(self, client: str, now: float) -> None:
        """The client is away from now on."""
        self._gone.pop(client, None)
        while self._gone and now - next(iter(self._gone.values())) > MOST_SECONDS:
            del self._gone[next(iter(self._gone))]
        self._gone[client] = now  # the last of all, which are in the order in which they left

    def came(self, client: str, startup_seconds: float, now: float) -> None:
        """The client is here, and says how long its process took to start; 0 = it does not know."""
        since = self._gone.pop(client, now)
        for seconds in (now - since, startup_seconds):
            if isfinite(seconds) and 0 < seconds <= MOST_SECONDS:
                self._seconds.append(seconds)
