"""The cost of a round with [sample_dp].

It is checked before the round, and charged after the training.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from fedring.client.policy.privacy import SitePolicy
from fedring.client.policy.promises import sample_dp_of
from fedring.client.transfer.own_values import line_of
from fedring.client.transfer.residual import RESIDUAL
from fedring.client.transfer.spool import Spool
from fedring.privacy.account import NoAccountant, SampledSteps
from fedring.train.errors import TrainError, TrainingStopped
from fedring.train.plan import Plan
from fedring.train.private_loop import sampled_steps
from fedring.v1 import federation_pb2 as pb

log = logging.getLogger(__name__)


class SampleAccount(Protocol):
    """The account of a client's samples, such as a `Ledger`."""

    def sample_epsilon(self, delta: float, *, of: pb.TrainCmd | None = None, more: SampledSteps | None = None) -> float:
        """See `Ledger.sample_epsilon`."""
        ...


def cost_of(
    command: pb.TrainCmd, plan: Plan, size: int, *, policy: SitePolicy, account: SampleAccount
) -> SampledSteps | None:
    """Return the cost of a round's training, or None without [sample_dp].

    Args:
        command: The command of the round.
        plan: How the client trains.
        size: The number of its samples, at least 1.
        policy: What the site demands.
        account: What its samples have spent.

    Raises:
        TrainError: With the reason privacy_policy, if a limit would be passed, or no_accountant, if that is not known.
    """
    table = sample_dp_of(command.job)
    if table is None:
        return None
    cost = sampled_steps(plan, table, size)
    try:
        why = overspent(policy, account, command, cost)
    except NoAccountant as error:
        raise TrainError("no_accountant", f"There is a limit of the epsilon of samples: {error}.") from error
    if why:
        raise TrainError("privacy_policy", why)
    return cost


def overspent(policy: SitePolicy, account: SampleAccount, command: pb.TrainCmd, more: SampledSteps) -> str:
    """Return a sentence about the limit that a training would pass.

    Empty = it passes none. It has no figure of what was spent, from which the number of samples would follow.

    Args:
        policy: What the site demands.
        account: What the client has spent.
        command: The command of the round, of a job with [sample_dp].
        more: What the training would spend.

    Raises:
        NoAccountant: If there is a limit, and dp-accounting is not installed.
    """
    job = sample_dp_of(command.job)
    if job is not None and 0 < job.max_epsilon < account.sample_epsilon(job.delta, of=command, more=more):
        return (
            "One more round of this job would take the epsilon of this client's samples above sample_dp.max_epsilon = "
            f"{job.max_epsilon:g}."
        )
    if 0 < policy.max_sample_epsilon < account.sample_epsilon(policy.delta, more=more):
        return (
            "One more round would take the epsilon of this client's samples above its privacy.max_sample_epsilon = "
            f"{policy.max_sample_epsilon:g}."
        )
    return ""


class SampleCharge:
    """The charge of one round's training at fl-client.

    Args:
        command: The command of the round.
        spool: Of the client, with its account.

    Attributes:
        missing: Whether the job demands a charge of what is submitted, and nothing was charged yet.
    """

    def __init__(self, command: pb.TrainCmd, spool: Spool) -> None:
        self.missing = bool(command.job.sample_dp)
        self._command, self._spool = command, spool

    def cost(self, plan: Plan, size: int, policy: SitePolicy) -> SampledSteps | None:
        """Return the cost of a training: see `cost_of`."""
        cost = cost_of(self._command, plan, size, policy=policy, account=self._spool.ledger)
        table = sample_dp_of(self._command.job)
        if table is not None and table.delta * size >= 1:
            log.warning("sample_dp.delta = %g should be below 1 / the number of samples", table.delta)
        return cost

    @contextmanager
    def of(self, cost: SampledSteps | None, delta: float) -> Iterator[None]:
        """Charge the training inside the context when it ends.

        This comes before anything of it may leave this client. A training that was stopped costs nothing. One that
        fails costs as much as any other, whatever the reason is.

        Args:
            cost: What it spends; None = nothing.
            delta: For the log: what epsilon is told for.

        Raises:
            OSError: If the account cannot be written.
        """
        try:
            yield
        except TrainingStopped:
            raise
        except BaseException:
            self._note(cost, delta)
            raise
        self._note(cost, delta)
        if cost is not None:
            self._tell_spent(delta)

    def _note(self, cost: SampledSteps | None, delta: float) -> None:
        if cost is None:
            return
        ledger = self._spool.ledger
        if not ledger.has_charged(self._command):  # no noise of this job may cover what is left from before it
            self._spool.kept.forget(line_of(self._command).key, RESIDUAL)
        ledger.charge_samples(self._command, cost)
        self.missing = False
        if self._spool.audit.on:
            names = {"job": self._command.job.job_id, "round": self._command.round}
            self._spool.audit.try_to_note("charged", **names, **ledger.sample_epsilons(delta))

    def _tell_spent(self, delta: float) -> None:
        """Log the epsilon that this client's samples have spent.

        The server is not told: the number of samples follows from it.
        """
        try:
            epsilon = self._spool.ledger.sample_epsilon(delta)
        except NoAccountant as error:
            log.warning("the epsilon of this client's samples is not known: %s", error)
            return
        text = "this client's samples have spent epsilon = %.3g for delta = %g"
        log.info(text, epsilon, delta, extra={"epsilon": epsilon, "delta": delta})
