"""The noise and the masks that a job promises for its updates."""

from pydantic import ValidationError

from fedring.train.jobs.privacy_table import ClientPrivacy
from fedring.train.jobs.sample_privacy_table import SamplePrivacy
from fedring.v1 import federation_pb2 as pb


def dp_of(job: pb.JobSpec) -> ClientPrivacy | None:
    """Return the differential privacy that a job promises, or None.

    None also stands for a promise that this program does not understand.
    """
    try:
        return ClientPrivacy.model_validate_json(job.dp) if job.dp else None
    except ValidationError:
        return None


def sample_dp_of(job: pb.JobSpec) -> SamplePrivacy | None:
    """Return the noise that a job asks of each client, or None.

    None also stands for noise that this program does not understand.
    """
    try:
        return SamplePrivacy.model_validate_json(job.sample_dp) if job.sample_dp else None
    except ValidationError:
        return None


def is_covered(command: pb.TrainCmd) -> bool:
    """Return whether masks or noise cover a round.

    Failures of such a round are not told.
    """
    job = command.job
    return job.mode == "federated" and (command.HasField("secure") or bool(job.dp) or bool(job.sample_dp))
