"""Durations of clients' absences, which bound the wait for lost clients."""

from collections import deque
from math import isfinite

MOST_SECONDS = 600.0
"""Seconds; a client that is away for longer was not restarted, and does not count."""
_NEWEST = 64  # absences and starts that count


class Returns:
    """The newest ended absences and start-up times of clients.

    All in seconds, of the monotonic clock; clients report their start-up times themselves.
    """

    def __init__(self) -> None:
        self._gone: dict[str, float] = {}  # when each client that is away has left
        self._seconds: deque[float] = deque(maxlen=_NEWEST)

    @property
    def slowest(self) -> float:
        """The longest of them, in seconds; 0 if nothing is known."""
        return max(self._seconds, default=0.0)

    def left(self, client: str, now: float) -> None:
        """Note that the client is away from now on."""
        self._gone.pop(client, None)
        while self._gone and now - next(iter(self._gone.values())) > MOST_SECONDS:
            del self._gone[next(iter(self._gone))]
        self._gone[client] = now  # at the end: the dictionary is in the order in which clients left

    def came(self, client: str, startup_seconds: float, now: float) -> None:
        """Note that the client is here.

        `startup` is how long its process took to start, 0 if it does not know.
        """
        since = self._gone.pop(client, now)
        for seconds in (now - since, startup_seconds):
            if isfinite(seconds) and 0 < seconds <= MOST_SECONDS:
                self._seconds.append(seconds)
