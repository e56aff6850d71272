"""The weights of updates that began with older versions.

A buffer of K updates makes w + (1/K) sum s(t_i) d_i (FedBuff, Nguyen et al. 2022, algorithm 1), in which the update
d_i is t_i versions old. K is the same for each version, however many updates there are, so that one update moves the
mean by at most its clip over K. So the accountant of the table [dp] holds as it is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from fedring.server.aggregation.combining import Combination
from fedring.server.aggregation.contributions import Contribution
from fedring.server.aggregation.rule import Rule
from fedring.server.aggregation.steps import Step
from fedring.server.aggregation.terms import Terms
from fedring.server.model.transforms.transform import ClosedRound, Feature
from fedring.server.state.rows import UpdateRow
from fedring.train.jobs.asynchronous_table import Asynchronous, staleness_weight
from fedring.train.jobs.job import Job
from fedring.v1 import federation_pb2 as pb


@dataclass(frozen=True, slots=True)
class Staleness(Feature):
    """The table [asynchronous]."""

    table: Asynchronous

    @classmethod
    def of(cls, job: Job) -> Self | None:
        """See Feature.of."""
        return cls(job.asynchronous) if job.asynchronous else None

    def terms(self, terms: Terms, command: pb.TrainCmd, members: int) -> Terms:
        """See Transform.terms.

        Whole models would be compared with a version that they did not begin with.
        """
        return replace(terms, deltas_only=True)

    def close(self, closed: ClosedRound, rule: Rule | None) -> Step:
        """See Transform.close."""
        return Weighted(self.table, closed.updates)


class Weighted(Step):
    """The weights of one buffer.

    Args:
        table: of the job.
        updates: that make the version.
    """

    def __init__(self, table: Asynchronous, updates: Sequence[UpdateRow]) -> None:
        self._buffer = table.buffer
        self._staleness: Mapping[str, int] = {row.client_id: row.staleness for row in updates}

    def contributions(self, given: list[Contribution], length: int) -> list[Contribution]:
        """See Step.contributions."""
        return [replace(each, weight=staleness_weight(self._staleness[each.client_id])) for each in given]

    def combination(self, how: Combination) -> Combination:
        """See Step.combination."""
        return replace(how, divisor=float(self._buffer))
