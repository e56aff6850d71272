"""The report of a simulation, and the view of one that runs."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fedring.control.notebook import LiveView
from fedring.control.view import JobView, RoundFigures
from fedring.simulation.server import Row
from fedring.train.jobs.job import Job


class SimulationReport(dict[str, Any]):
    """The report of a simulation, which a notebook shows with its curve.

    Args:
        figures: All figures.
        job: The job that was simulated.
    """

    def __init__(self, figures: Mapping[str, Any], job: Job) -> None:
        super().__init__(figures)
        self._name, self._total = job.name, job.rounds

    def _repr_html_(self) -> str:
        return JobView(self._name, "completed", self._total, rounds_of(self["rounds"])).html()


def rounds_of(rows: Sequence[Row]) -> list[RoundFigures]:
    """Return the figures of rounds for a view."""
    return [RoundFigures(row["round"], row["accuracy"], row["loss"], row["metrics"]) for row in rows]


@contextmanager
def following(job: Job, live: LiveView) -> Iterator["Follower"]:
    """Show a simulation in a notebook until it ends."""
    follower, state = Follower(job, live), "failed"
    follower(0.0, None)
    try:
        yield follower
        state = "completed"
    except KeyboardInterrupt:
        state = "interrupted"
        raise
    finally:
        follower.end(state)


class Follower:
    """Takes the progress of a simulation, as `show`."""

    def __init__(self, job: Job, live: LiveView) -> None:
        self._job, self._live = job, live
        self._rows: list[Row] = []
        self._share: float = 0.0

    def __call__(self, share: float, row: Row | None) -> None:
        if row is not None and (not self._rows or self._rows[-1] is not row):
            self._rows.append(row)
        self._share = share
        self._live.update(lambda: self._html("running"))

    def end(self, state: str) -> None:
        """Show the last state."""
        self._live.update(lambda: self._html(state), last=True)

    def _html(self, state: str) -> str:
        return JobView(self._job.name, state, self._job.rounds, rounds_of(self._rows), self._share).html()
