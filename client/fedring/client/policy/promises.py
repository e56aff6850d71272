"""The noise and the masks that a job promises for its updates."""

from typing import TypeVar

from pydantic import BaseModel, ValidationError

from fedring.train.jobs.privacy_table import ClientPrivacy
from fedring.train.jobs.sample_privacy_table import SamplePrivacy
from fedring.train.jobs.secure_table import SecureAggregation
from fedring.v1 import federation_pb2 as pb

Table = TypeVar("Table", bound=BaseModel)


def dp_of(job: pb.JobSpec) -> ClientPrivacy | None:
    """Return the differential privacy that a job promises, or None.

    None also stands for a promise that this program does not understand.
    """
    return _table(ClientPrivacy, job.dp)


def sample_dp_of(job: pb.JobSpec) -> SamplePrivacy | None:
    """Return the noise that a job asks of each client, or None.

    None also stands for noise that this program does not understand.
    """
    return _table(SamplePrivacy, job.sample_dp)


def secure_of(job: pb.JobSpec) -> SecureAggregation | None:
    """Return the sums that a job promises to open only, or None.

    None also stands for a table that this program does not understand.
    """
    return _table(SecureAggregation, job.secure_aggregation)


def promises_of(job: pb.JobSpec) -> tuple[str, ...]:
    """Return a job's tables that hide clients or samples, as JSON."""
    return tuple(table for table in (job.secure_aggregation, job.dp, job.sample_dp) if table)


def has_noise(job: pb.JobSpec) -> bool:
    """Return whether noise covers the models that a job makes."""
    return bool(job.dp or job.sample_dp)


def is_covered(command: pb.TrainCmd) -> bool:
    """Return whether masks or noise cover a round.

    Failures of such a round are not told.
    """
    return command.job.mode == "federated" and (command.HasField("secure") or has_noise(command.job))


def hides_training(command: pb.TrainCmd) -> bool:
    """Return whether nobody else may be able to repeat a client's training.

    That is so in jobs that promise to hide single clients, and in rounds with masks.
    """
    return bool(promises_of(command.job)) or is_covered(command)  # a server may send masks without their table


def _table(kind: type[Table], text: str) -> Table | None:
    try:
        return kind.model_validate_json(text) if text else None
    except ValidationError:
        return None
