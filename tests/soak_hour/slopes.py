"""How fast figures grow with the rounds of a long run, and whether that is too fast. Nothing here measures anything."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

WARM_UP = 0.25
"""The share of a run that does not count: caches fill, and the memory of the allocator finds its size."""

ROW_MB, EVENT_MB, JOB_MB = 400e-6, 300e-6, 3000e-6
"""What the database needs for a client in a round, for an event and for a job, at most, in MB. docs/configuration.md
says some 250 bytes for the first (keep_rounds); pages are not always full. Jobs are never removed."""

_FEWEST = 3  # samples, of which a line has an error


class Limit(NamedTuple):
    """How much a figure may grow in 1,000 rounds: by a share of its mean, and by an amount."""

    share: float = 0.0
    amount: float = 0.0


DATABASE, EVENTS = "server database", "events"
"""A figure with a limit of its own, and one without a limit: how many events the database has."""

LIMITS: Mapping[str, Limit] = {
    "server memory": Limit(share=0.005),
    "client memory": Limit(share=0.005),
    "server descriptors": Limit(amount=0.5),
    "client descriptors": Limit(amount=0.5),
    "server threads": Limit(amount=0.5),
    "client threads": Limit(amount=0.5),
    "server files": Limit(amount=1.0),
    "server disk without the database": Limit(share=0.005, amount=0.01),
    DATABASE: Limit(share=0.01),
    "server log of the database": Limit(share=0.02),
    "client disk": Limit(share=0.005, amount=0.001),
    "round": Limit(share=0.1),
}
"""By figure. 0.5 % in 1,000 rounds are 5 % in 10,000; the time of a round is that of a machine with other work."""

UNITS = {"memory": "MB", "disk": "MB", "database": "MB", "log": "MB", "round": "ms"}
"""The units of figures, by a word in their names; others are counts."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What was measured at one moment."""

    seconds: float  # since the begin
    rounds: int  # published so far
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Slope:
    """How a figure grows.

    Attributes:
        figure: Its name.
        mean: Of what counts.
        per_thousand: How much it grows in 1,000 rounds: the slope of the line with the least squares.
        error: The standard error of that.
        limit: How much it may grow.
    """

    figure: str
    mean: float
    per_thousand: float
    error: float
    limit: float

    @property
    def too_steep(self) -> bool:
        """Whether it surely grows by more than it may, as far as two standard errors are sure."""
        return self.per_thousand - 2 * self.error > self.limit


@dataclass(frozen=True, slots=True)
class Kept:
    """What a server keeps before its database is full, which is documented.

    Attributes:
        clients: The clients of each round.
        rounds: The newest rounds whose facts it keeps.
        events: The newest events that it keeps.
        job_rounds: The rounds of each job.
    """

    clients: int
    rounds: int
    events: int
    job_rounds: int

    def growth(self, begin: Sample) -> float:
        """Return by how much the database may grow in 1,000 rounds, in MB, where these samples begin."""
        known, events = begin.rounds or 1, begin.figures.get(EVENTS, 0.0)
        rows = 1000 * self.clients * ROW_MB if known < self.rounds else 0.0
        return (
            1000 / self.job_rounds * JOB_MB + rows + (1000 * events / known * EVENT_MB if events < self.events else 0.0)
        )


def slopes(samples: Sequence[Sample], kept: Kept) -> list[Slope]:
    """Return how each figure grows after the warm-up.

    Args:
        samples: In order.
        kept: What the server keeps.

    Raises:
        ValueError: If there are too few samples, or no rounds between them.
    """
    counted = [each for each in samples if each.seconds >= samples[-1].seconds * WARM_UP]
    if len(counted) < _FEWEST or counted[0].rounds == counted[-1].rounds:
        raise ValueError(f"{len(counted)} samples after the warm-up: the run was too short")
    found, extra = [], {DATABASE: kept.growth(counted[0])}
    for name, limit in LIMITS.items():
        points = [(each.rounds / 1000, each.figures[name]) for each in counted if name in each.figures]
        mean, slope, error = line_through(points)
        allowed = limit.share * mean + limit.amount + extra.get(name, 0.0)
        found.append(Slope(name, mean, slope, error, allowed))
    return found


def line_through(points: Iterable[tuple[float, float]]) -> tuple[float, float, float]:
    """Return the mean of y, the slope of the line with the least squares, and the standard error of the slope."""
    x, y = (np.array(values, np.float64) for values in zip(*points, strict=True))
    away = x - x.mean()
    spread = float(away @ away)
    slope = float(away @ y) / spread
    left = y - y.mean() - slope * away
    error = math.sqrt(float(left @ left) / max(1, len(x) - 2) / spread)
    return float(y.mean()), slope, error


def unit_of(figure: str) -> str:
    """Return the unit of a figure; empty for counts."""
    return next((unit for word, unit in UNITS.items() if word in figure.split()), "")
