"""The guards of the mean, on the weights and norms of updates."""

from dataclasses import dataclass, replace
from typing import Any, Self

from fedring.server.aggregation.contributions import Contribution
from fedring.server.aggregation.rule import Rule
from fedring.server.aggregation.steps import Step
from fedring.server.aggregation.terms import Terms
from fedring.server.model.guards import Guard, guard
from fedring.server.model.transforms.transform import ClosedRound, Feature
from fedring.train.jobs.job import Job
from fedring.v1 import federation_pb2 as pb


@dataclass(frozen=True, slots=True)
class Guards(Feature):
    """The guards of all jobs: weights, `max_samples`, `update_clip`, `update_clip_factor`, `normalize_steps`."""

    clips: bool  # whether updates that are too long are shortened

    @classmethod
    def of(cls, job: Job) -> Self:
        """See Feature.of."""
        return cls(bool(job.update_clip or job.update_clip_factor))

    def terms(self, terms: Terms, command: pb.TrainCmd, members: int) -> Terms:
        """See Transform.terms."""
        return replace(terms, deltas_only=terms.deltas_only or self.clips)

    def close(self, closed: ClosedRound, rule: Rule | None) -> Step:
        """See Transform.close."""
        last = closed.past.last_stats() if closed.job.update_clip_factor else {}
        median, job_round = float(last.get("median_norm", 0.0)), closed.command.job_round
        averages, told = rule is None, closed.told
        return Guarded(guard(closed.job, closed.updates, median, job_round=job_round, averages=averages, told=told))


class Guarded(Step):
    """The guards of one round.

    Args:
        found: what they do to its updates.

    Attributes:
        found: the same.
    """

    def __init__(self, found: Guard) -> None:
        self.found = found

    def stats(self) -> dict[str, Any]:
        """See Step.stats."""
        return self.found.stats()

    def contributions(self, given: list[Contribution], length: int) -> list[Contribution]:
        """See Step.contributions."""
        weights, factors = self.found.weights, self.found.factors
        return [
            replace(each, weight=weights[each.client_id], factor=factors.get(each.client_id, 1.0)) for each in given
        ]
