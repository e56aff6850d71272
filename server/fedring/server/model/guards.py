"""Guards of the mean: bounds on an update's weight and length.

With an update_clip of C and weights of at most w_max, replacing the update of one client by anything else moves the
mean by at most 2 C w_max / sum(w). With normalize_steps it may also change how much the other updates count.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from types import MappingProxyType
from typing import Any

from fedring.server.aggregation.fednova import factors_of
from fedring.server.state.rows import UpdateRow
from fedring.train.jobs.aggregation_table import MEAN
from fedring.train.jobs.job import Job


@dataclass(frozen=True, slots=True)
class Guard:
    """The guards' effect on the updates of one round."""

    weights: dict[str, float] = field(default_factory=dict)  # by client id
    factors: dict[str, float] = field(default_factory=dict)  # of the deltas; a client without one has the factor 1
    bound: float = 0.0  # of the updates' norms; 0 = none
    median_norm: float = 0.0  # of the updates before they are clipped
    clipped: tuple[str, ...] = ()  # clients whose update is shortened, sorted
    capped: tuple[str, ...] = ()  # clients that reported more samples than max_samples, sorted

    def stats(self) -> dict[str, Any]:
        """Return the known figures for the round's row."""
        figures = {
            "update_clip": self.bound,
            "median_norm": self.median_norm if self.bound else 0.0,
            "clipped": list(self.clipped),
            "capped": list(self.capped),
        }
        return {key: value for key, value in figures.items() if value}


def weight_of(job: Job, num_samples: int) -> float:
    """Return the aggregation weight of a client with `num_samples` samples.

    It is the weight in means of updates and of metrics.
    """
    return float(num_samples > 0 if job.weights == "uniform" else min(num_samples, job.max_samples))


def guard(
    job: Job,
    updates: Sequence[UpdateRow],
    last_median: float = 0.0,
    *,
    job_round: int = 1,
    averages: bool = False,
    told: Mapping[str, Job] = MappingProxyType({}),
) -> Guard:
    """Return the effect of a job's guards on a round's updates.

    Args:
        job: has the guards' settings.
        updates: the accepted updates, at least one.
        last_median: the median norm in the last round that published a model; 0 = not known, and the median norm of
            these updates replaces it.
        job_round: the number of the round within the job.
        averages: whether the job's rule, although it is the user's own, is the mean.
        told: the jobs of clients for which overrides hold, by client id.
    """
    weights = {row.client_id: weight_of(job, row.num_samples) for row in updates}
    # An update is normalised before it is clipped, so that no factor takes it beyond the bound.
    by_mean = averages or job.aggregation.rule == MEAN
    factors = factors_of(job, job_round, updates, weights if by_mean else dict.fromkeys(weights, 1.0), told=told)
    norms = {row.client_id: row.norm * factors.get(row.client_id, 1.0) for row in updates}
    # The lower of two medians: of two clients, the one with the longer update does not choose its own bound.
    median = median_low(norms.values())
    bounds = (job.update_clip, job.update_clip_factor * (last_median or median))
    bound = min((each for each in bounds if each), default=0.0)
    clipped = sorted(client for client, norm in norms.items() if 0 < bound < norm)
    return Guard(
        weights=weights,
        factors=factors | {client: factors.get(client, 1.0) * bound / norms[client] for client in clipped},
        bound=bound,
        median_norm=median,
        clipped=tuple(clipped),
        capped=()
        if job.weights == "uniform" or job.training.grouped or not (by_mean or job.aggregation.own)
        else tuple(sorted(row.client_id for row in updates if row.num_samples > job.max_samples)),
    )
