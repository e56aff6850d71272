"""A command of a server, held against a signed job.

A command is made again from the signed job, so that whatever follows from the job is compared, and nothing is listed
twice. What the server alone can know is bounded by `Bounds`, or left to it: docs/consent.md says what that is.
"""

from collections.abc import Mapping

from fedring.train.jobs.job import Job
from fedring.train.jobs.override_table import overrides_for, with_overrides
from fedring.train.orders.commands import job_spec, train_cmd, training_of
from fedring.train.orders.signed_job import BadOrder, JobOrder
from fedring.train.orders.sums import add_sums
from fedring.v1 import federation_pb2 as pb

_FOLLOWING = ("seed", "encoding", "without_evaluation")
"""The fields of a command, beside those of the training, that follow from the job and the number of the round."""

_SERVERS = ("frozen_digest", "signed")
"""The fields of a job in a command that do not follow from the signed job."""

_PARTS = tuple(
    field.name
    for field in pb.TrainCmd.DESCRIPTOR.fields
    if field.message_type is not None and field.name not in ("job", "encoding", "model")
)
"""The messages in a command that algorithms add."""


def check_train(order: JobOrder, command: pb.TrainCmd, labels: Mapping[str, str]) -> None:
    """Check that a round's command follows from a signed job.

    Args:
        order: The job.
        command: Of the server.
        labels: The client's own, by which [[override]] counts for it.

    Raises:
        BadOrder: If it does not; the sentence names the key.
    """
    job = order.job
    _check_job(order, command.job, command.run_id)
    if not 1 <= command.job_round <= job.rounds:
        raise BadOrder("too_many_rounds", f"round {command.job_round} of a job that was signed for {job.rounds}")
    places = overrides_for(labels, job.override)
    own = with_overrides(job, places)
    expected = train_cmd(own, command.job, number=command.round, job_round=command.job_round)
    add_sums(job, expected, command)
    if job.scaffold:  # only the server knows its control variate
        expected.control.CopyFrom(command.control)
    for key in _FOLLOWING:
        if getattr(command, key) != getattr(expected, key):
            raise _changed(key, getattr(command, key), getattr(expected, key))
    laid = {key for place in places for key in job.override[place].values}
    for key, wanted in training_of(own, command.job_round).items():
        _check_setting(job, key, getattr(command, key), wanted, fixed=key in laid)
    _check_parts(expected, command)
    if job.bounds.start_model and command.job_round == 1 and command.model_digest != job.bounds.start_model:
        text = f"the job was signed to start from {job.bounds.start_model}, and the server says {command.model_digest}"
        raise BadOrder("other_start", text)


def check_evaluate(order: JobOrder, command: pb.EvaluateCmd) -> None:
    """Check that an evaluation follows from a signed job.

    Raises:
        BadOrder: If it does not.
    """
    _check_job(order, command.job, command.run_id)
    if not order.job.evaluate:
        raise _changed("evaluate", True, False)


def _check_job(order: JobOrder, told: pb.JobSpec, run_id: str) -> None:
    if run_id != order.run_id:
        raise BadOrder("other_server", f"the job was signed for the server {order.run_id}, and this one is {run_id}")
    wanted = job_spec(order.job, told.job_id)
    for field in pb.JobSpec.DESCRIPTOR.fields:
        key = field.name
        if key not in _SERVERS and getattr(told, key) != getattr(wanted, key):
            raise BadOrder("changed_job", _differs(key, getattr(told, key), getattr(wanted, key)))
    if told.frozen_digest and not order.job.sharing.frozen_stay:
        raise BadOrder("changed_job", _differs("frozen_digest", told.frozen_digest, ""))


def _check_setting(job: Job, key: str, told: float | str, wanted: float | str, *, fixed: bool) -> None:
    pair = None if fixed else job.bounds.ranges.get(key)
    if pair is None:
        if told != wanted:
            raise _changed(key, told, wanted)
    elif not (isinstance(told, int | float) and pair[0] <= told <= pair[1]):
        raise BadOrder("changed_command", f"{key} is {told}, outside of the signed bounds [{pair[0]:g}, {pair[1]:g}]")


def _check_parts(expected: pb.TrainCmd, command: pb.TrainCmd) -> None:
    """Check which algorithms a command asks for, and their settings."""
    for key in _PARTS:
        if command.HasField(key) != expected.HasField(key):  # type: ignore[arg-type]  # all are fields
            raise _changed(key, command.HasField(key), expected.HasField(key))  # type: ignore[arg-type]  # as above
        told, wanted = getattr(command, key), getattr(expected, key)
        for field in wanted.DESCRIPTOR.fields:
            if getattr(told, field.name) != getattr(wanted, field.name):
                raise _changed(f"{key}.{field.name}", getattr(told, field.name), getattr(wanted, field.name))


def _changed(key: str, told: object, wanted: object) -> BadOrder:
    return BadOrder("changed_command", _differs(key, told, wanted))


def _differs(key: str, told: object, wanted: object) -> str:
    return f"{key} is {_short(told)}, and follows from the signed job as {_short(wanted)}"


def _short(value: object) -> str:
    text = " ".join(str(value).split()) or "empty"
    return text if len(text) <= 200 else f"{text[:200]}..."
