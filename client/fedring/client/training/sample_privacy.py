"""The cost of a round with [sample_dp].

It is checked before the round, and charged after the training.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from fedring.client.policy.ledger import Ledger
from fedring.client.policy.privacy import SitePolicy
from fedring.client.policy.promises import sample_dp_of
from fedring.client.task import Task
from fedring.privacy.account import NoAccountant, SampledSteps
from fedring.train.errors import TrainError, TrainingStopped
from fedring.train.private_loop import sampled_steps
from fedring.v1 import federation_pb2 as pb

log = logging.getLogger(__name__)


def spending(task: Task, policy: SitePolicy, size: int) -> SampledSteps | None:
    """Return the cost of a round's training, or None without [sample_dp].

    Args:
        task: The task.
        policy: What the site demands.
        size: The number of samples of this client, at least 1.

    Raises:
        TrainError: With the reason privacy_policy, if a limit would be passed, or no_accountant, if that is not known.
    """
    private = sample_dp_of(task.job)
    if private is None:
        return None
    spent = sampled_steps(task.plan, private, size)
    try:
        why = overspent(policy, task.ledger, task.command, spent)
    except NoAccountant as error:
        raise TrainError("no_accountant", f"There is a limit of the epsilon of samples: {error}.") from error
    if why:
        raise TrainError("privacy_policy", why)
    if private.delta * size >= 1:
        log.warning("sample_dp.delta = %g should be below 1 / the number of samples", private.delta)
    return spent


@contextmanager
def charging(task: Task, spent: SampledSteps | None, delta: float) -> Iterator[None]:
    """Charge the training inside the context when it ends.

    This comes before anything of it may leave this client. A training that was stopped costs nothing. One that fails
    costs as much as any other, whatever the reason is.

    Args:
        task: The task.
        spent: What it spends; None = nothing.
        delta: For the log: what epsilon is told for.

    Raises:
        OSError: If the account cannot be written.
    """
    try:
        yield
    except TrainingStopped:
        raise
    except BaseException:
        if spent is not None:
            task.charge(spent)
        raise
    if spent is not None:
        task.charge(spent)
        _tell_spent(task.ledger, delta)


def overspent(policy: SitePolicy, ledger: Ledger, command: pb.TrainCmd, more: SampledSteps) -> str:
    """Return a sentence about the limit that a training would pass.

    Empty = it passes none. It has no figure of what was spent, from which the number of samples would follow.

    Args:
        policy: What the site demands.
        ledger: What the client has spent.
        command: The command of the round, of a job with [sample_dp].
        more: What the training would spend.

    Raises:
        NoAccountant: If there is a limit, and dp-accounting is not installed.
    """
    job = sample_dp_of(command.job)
    if job is not None and 0 < job.max_epsilon < ledger.sample_epsilon(job.delta, of=command, more=more):
        return (
            "One more round of this job would take the epsilon of this client's samples above sample_dp.max_epsilon = "
            f"{job.max_epsilon:g}."
        )
    if 0 < policy.max_sample_epsilon < ledger.sample_epsilon(policy.delta, more=more):
        return (
            "One more round would take the epsilon of this client's samples above its privacy.max_sample_epsilon = "
            f"{policy.max_sample_epsilon:g}."
        )
    return ""


def _tell_spent(ledger: Ledger, delta: float) -> None:
    """Log the epsilon that this client's samples have spent.

    The server is not told: the number of samples follows from it.
    """
    try:
        epsilon = ledger.sample_epsilon(delta)
    except NoAccountant as error:
        log.warning("the epsilon of this client's samples is not known: %s", error)
        return
    text = "this client's samples have spent epsilon = %.3g for delta = %g"
    log.info(text, epsilon, delta, extra={"epsilon": epsilon, "delta": delta})
