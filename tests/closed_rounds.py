"""Closed rounds without clients or a network, for tests that make models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedring.server.model.making import ModelMaker
from fedring.server.model.masked_sum import GroupMasks
from fedring.server.model.transforms.transform import ClosedRound
from fedring.server.state.rows import ModelRow, UpdateRow
from fedring.train.jobs.job import Job
from fedring.v1 import federation_pb2 as pb
from fedring.v1.secure_pb2 import SecureRound


@dataclass(frozen=True)
class FixedPast:
    """The past of a round, as it is given."""

    stats: Mapping[str, Any] = field(default_factory=dict)
    clip: float = 0.0
    secret: bytes = bytes(range(1, 33))
    updates: Sequence[UpdateRow] = ()

    def last_stats(self) -> Mapping[str, Any]:
        return self.stats

    def last_clip(self) -> float:
        return self.clip

    def uncounted(self) -> Sequence[UpdateRow]:
        return self.updates

    def noise_secret(self) -> bytes:
        return self.secret


def closed_round(
    job: Job,
    updates: Sequence[UpdateRow],
    number: int = 1,
    *,
    seed: int = 0,
    job_round: int = 1,
    job_id: int = 1,
    groups: Sequence[GroupMasks] | None = None,
    secure: SecureRound | None = None,
    past: FixedPast | None = None,
) -> ClosedRound:
    """Return a round that has drawn the clients of these updates."""
    command = pb.TrainCmd(
        run_id="run-1", round=number, job_round=job_round, seed=seed, job=pb.JobSpec(job_id=job_id), secure=secure
    )
    return ClosedRound(job, command, updates, len(updates), "", groups, past or FixedPast())


def next_model(
    maker: ModelMaker, base: ModelRow, updates: Sequence[UpdateRow], job: Job, number: int, version: int, **keys: Any
) -> ModelRow:
    """Make the next model of these updates; `keys` are those of `closed_round`."""
    return maker.next(base, maker.prepare(closed_round(job, updates, number, **keys)), version)


def secure_round_of(maker: ModelMaker, base: ModelRow, job: Job) -> SecureRound:
    """Return what the command of a round with secure aggregation says of its values."""
    command = pb.TrainCmd()
    maker.command(job, command, base)
    return command.secure
