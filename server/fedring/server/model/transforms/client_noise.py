"""Differential privacy by the clients, with sums of noisy integers."""

from dataclasses import dataclass, replace
from typing import Any, Self

from fedring.codec.schema import Schema
from fedring.privacy.charges import Charge
from fedring.secure.masks import Width
from fedring.server.aggregation.combining import Combination
from fedring.server.aggregation.contributions import Contribution
from fedring.server.aggregation.rule import Rule
from fedring.server.aggregation.steps import BaseFiles, Step
from fedring.server.model.masked_sum import private_width
from fedring.server.model.private_mean import PrivateRound, summed_round
from fedring.server.model.transforms.masked import Masked, Sums
from fedring.server.model.transforms.server_noise import check_charge
from fedring.server.model.transforms.transform import ClosedRound, Skeleton
from fedring.server.state.rows import ModelRow
from fedring.train.jobs.job import Job
from fedring.train.jobs.privacy_table import ClientPrivacy
from fedring.train.orders.sums import secure_settings
from fedring.v1 import federation_pb2 as pb
from fedring.v1 import secure_pb2 as wire


@dataclass(frozen=True)
class ClientNoise(Masked):
    """The table [dp] with `noise_by = "clients"`, and the table [secure_aggregation]."""

    table: ClientPrivacy

    @classmethod
    def of(cls, job: Job) -> Self | None:
        """See Feature.of."""
        return cls(job.dp) if job.dp is not None and job.dp.by_clients else None

    def check(self, job: Job, schema: Schema, skeleton: Skeleton) -> None:
        """See Transform.check."""
        super().check(job, schema, skeleton)
        check_charge(self, job, schema)

    def most_charged(self, job: Job, length: int) -> Charge:
        """See Transform.most_charged."""
        if job.secure_aggregation is None:
            raise ValueError("the clients add noise to sums only")
        needed = job.min_clients_to_aggregate
        most = max(job.sample_clients, needed) if job.sample_clients else 0
        return self.table.charge_of(job.secure_aggregation.group_sizes(needed, most), length, needed)

    def values(self, job: Job, base: ModelRow, files: BaseFiles) -> wire.SecureRound:
        """See Masked.values."""
        return secure_settings(job)

    def width(self, command: pb.TrainCmd, length: int, members: int) -> Width:
        """See Masked.width."""
        return private_width(self.table.plan(members, length, command.job.min_results))

    def close(self, closed: ClosedRound, rule: Rule | None) -> Step:
        """See Transform.close."""
        return SumsWithNoise(closed, summed_round(self.table, closed.selected))


class SumsWithNoise(Sums):
    """The sum of noisy groups over a fixed number of clients.

    It costs nothing at the end of the round: it was charged when the sums could be seen.
    """

    def __init__(self, closed: ClosedRound, done: PrivateRound) -> None:
        super().__init__(closed)
        self._done = done

    def stats(self) -> dict[str, Any]:
        """See Step.stats."""
        return self._done.stats()

    def contributions(self, given: list[Contribution], length: int) -> list[Contribution]:
        """Return the sum of each group, with the weight 1."""
        return [replace(each, weight=1.0) for each in super().contributions(given, length)]

    def combination(self, how: Combination) -> Combination:
        """See Step.combination."""
        return replace(how, divisor=self._done.mean.divisor)
