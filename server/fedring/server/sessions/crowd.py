"""Times for clients to come back, so that no crowd forms.

Two things make a crowd. Thousands of clients come back at once, after a restart of the server: the server can only
greet so many at a time, and whoever waits longer than a session may last without a stream has come in vain. So the
others get places in a line, as far apart as the server has greeted clients of late. And there may be far more clients
than a round needs. Then those that are not needed leave, and come back later: in turn, all of them are here for a while
(Bonawitz 2019, section 2.3, "pace steering"). Nothing here performs I/O or reads a clock.
"""

import heapq
import random
from math import exp

from fedring.rpc.errors import MOST_AWAY

ARRIVING = 256
"""Clients that may have joined without having been greeted; others get a place in the line."""

_WINDOW = 5.0  # seconds over which the rate of arrivals is measured
_LEAST_SEEN = 0.2  # of these seconds, from which a rate is told
_EAGER = 1.3  # places are given for more than were greeted, so that the server never waits for the next one
_LEAST_RATE = 150.0  # arrivals in a second; a server that sends thousands away greets few meanwhile
_MOST_KNOWN = 1_000_000  # clients that are away; names are short, and these take some 200 MB
_LONGEST_LINE = 120.0  # seconds
_SPREAD = 0.5  # of the time away, both ways


class Line:
    """The line of clients that wait to be let in."""

    def __init__(self) -> None:
        self._recent, self._since = 0.0, 0.0  # arrivals, of which older ones count less and less
        self._began = 0.0  # when they began, after nobody had come for long
        self._last = 0.0  # the time of the last place in the line

    def arrived(self, now: float) -> None:
        """Note that the server has greeted a client."""
        before = self._recent * exp((self._since - now) / _WINDOW)
        if before < 1.0:
            self._began = now
        self._recent, self._since = before + 1.0, now

    def place(self, now: float) -> float:
        """Return in how many seconds one more client shall come back."""
        self._last = max(self._last, now + 1.0) + 1.0 / max(_LEAST_RATE, _EAGER * self._rate(now))
        if self._last - now <= _LONGEST_LINE:
            return self._last - now
        # Whoever calls again and again must not make the line longer and longer.
        self._last = now + _LONGEST_LINE
        return random.uniform(0.5, 1.0) * _LONGEST_LINE

    def _rate(self, now: float) -> float:
        """Return the arrivals in a second of late.

        Nearly all of a crowd gets its places in the first seconds, so these count as what they are, and not as a part
        of a window that was empty before.
        """
        seen = max(now - self._began, _LEAST_SEEN)
        return self._recent * exp((self._since - now) / _WINDOW) / (_WINDOW * (1.0 - exp(-seen / _WINDOW)))


class PaceSteering:
    """The times away of clients that are too many.

    Args:
        most: The clients that may be connected; 0 = any number.
        stay: Seconds that each is here before it is told to leave.
        seed: Of the random part of each time.
    """

    def __init__(self, most: int, stay: float, seed: int | None = None) -> None:
        self.most, self.stay = most, stay
        self._away: dict[str, float] = {}  # when each client that was told to leave comes back
        self._order: list[tuple[float, str]] = []  # a heap of them
        self._random = random.Random(seed)

    def crowded(self, here: int, now: float) -> bool:
        """Return whether there are more clients than may be here.

        Those that are away count, too.
        """
        while self._order and self._order[0][0] <= now:
            until, client = heapq.heappop(self._order)
            if self._away.get(client) == until:
                del self._away[client]
        return 0 < self.most < here + len(self._away)

    def leave(self, client: str, here: int, now: float) -> float:
        """Return how long a client that leaves stays away.

        In seconds. If all clients are here for `stay` seconds of that time, about `most` are here at once. A client
        that calls too early is told the rest of its time, so that nobody can count for more than one.
        """
        self.crowded(here, now)
        if (until := self._away.get(client)) is not None:
            return until - now
        share = (here + len(self._away)) / self.most - 1.0
        mean = max(self.stay, self.stay * share)
        seconds = min(mean * self._random.uniform(1.0 - _SPREAD, 1.0 + _SPREAD), MOST_AWAY)
        if len(self._away) < _MOST_KNOWN:
            self._away[client] = now + seconds
            heapq.heappush(self._order, (now + seconds, client))
        return seconds

    def came(self, client: str) -> bool:
        """Note that a client is here, and return whether it was away."""
        return self._away.pop(client, None) is not None
