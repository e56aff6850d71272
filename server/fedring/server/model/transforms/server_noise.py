"""Differential privacy by the server, with clipped updates and a noisy mean."""

import time
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from fedring.codec.schema import Schema
from fedring.privacy.account import NoAccountant, check_accountant
from fedring.privacy.charges import Charge
from fedring.server.aggregation.combining import Combination
from fedring.server.aggregation.contributions import Contribution
from fedring.server.aggregation.rule import Rule
from fedring.server.aggregation.steps import Step
from fedring.server.aggregation.terms import Terms
from fedring.server.model.private_mean import PrivateRound, private_round
from fedring.server.model.transforms.transform import ClosedRound, Feature, Skeleton, Transform
from fedring.server.state.rows import ChargeRow
from fedring.train.jobs.job import Job
from fedring.train.jobs.privacy_table import ClientPrivacy
from fedring.v1 import federation_pb2 as pb


@dataclass(frozen=True, slots=True)
class ServerNoise(Feature):
    """The table [dp], unless the clients add the noise."""

    hides_norms: ClassVar[bool] = True

    table: ClientPrivacy

    @classmethod
    def of(cls, job: Job) -> Self | None:
        """See Feature.of."""
        return None if job.dp is None or job.dp.by_clients else cls(job.dp)

    def check(self, job: Job, schema: Schema, skeleton: Skeleton) -> None:
        """See Transform.check."""
        check_no_buffers(schema, "dp", "noise")
        check_charge(self, job, schema)

    def most_charged(self, job: Job, length: int) -> Charge:
        """See Transform.most_charged."""
        return self.table.noise_multiplier

    def terms(self, terms: Terms, command: pb.TrainCmd, members: int) -> Terms:
        """See Transform.terms."""
        return replace(terms, deltas_only=True, bare=True)

    def close(self, closed: ClosedRound, rule: Rule | None) -> Step:
        """See Transform.close."""
        clip = closed.past.last_clip() or self.table.clip
        secret, run_id = closed.past.noise_secret(), closed.command.run_id
        return Noised(closed, private_round(self.table, closed.updates, closed.selected, clip, secret, run_id))


class Noised(Step):
    """The noise of one round, and the lengths of its updates.

    Args:
        closed: the round.
        done: what is done to it.
    """

    def __init__(self, closed: ClosedRound, done: PrivateRound) -> None:
        self._command, self._done = closed.command, done

    def stats(self) -> dict[str, Any]:
        """See Step.stats."""
        return self._done.stats()

    def charge(self) -> ChargeRow:
        """See Step.charge."""
        command, done = self._command, self._done
        return ChargeRow(command.round, command.job.job_id, done.noise_multiplier, done.next_clip, time.time())

    def contributions(self, given: list[Contribution], length: int) -> list[Contribution]:
        """See Step.contributions."""
        factors = self._done.guarded.factors
        return [replace(each, weight=1.0, factor=factors.get(each.client_id, 1.0)) for each in given]

    def combination(self, how: Combination) -> Combination:
        """See Step.combination."""
        return replace(how, divisor=self._done.mean.divisor)

    def piece(self, start: int, delta: NDArray[np.float64]) -> None:
        """See Step.piece."""
        self._done.mean.added(delta, start)


def check_no_buffers(schema: Schema, key: str, how: str) -> None:
    """Check that a model has no buffers.

    They would be averaged as they are.

    Raises:
        ValueError: if it has.
    """
    buffer = next((entry.name for entry in schema.entries if entry.role == "buffer"), "")
    if buffer:
        raise ValueError(
            f"{key}: the buffer {buffer} would be averaged without {how}: use GroupNorm instead of BatchNorm, or keep "
            "buffers private"
        )


def check_charge(transform: Transform, job: Job, schema: Schema) -> None:
    """Check that epsilon can be computed.

    Raises:
        ValueError: if it cannot.
    """
    try:
        check_accountant()
        transform.most_charged(job, schema.num_parameters)
    except (NoAccountant, ValueError) as error:
        raise ValueError(f"dp: {error}") from error
