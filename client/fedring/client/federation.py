"""`connect`, and the federation that it returns: an iterator of tasks."""

import logging
import signal
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from math import nan
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar

from torch import nn

from fedring.client.config import ClientConfig
from fedring.client.consent.consent import Consent
from fedring.client.consent.operators import Operators
from fedring.client.consent.orders import Orders
from fedring.client.errors import FederationClosed, Refused, RoundOver
from fedring.client.evaluation import Evaluation, report_of
from fedring.client.loading import ModelLoader
from fedring.client.metrics import ClientMetrics
from fedring.client.policy.privacy import check_policy, failed_too_often, may_count, refusal
from fedring.client.policy.promises import is_covered, promises_of
from fedring.client.policy.secret import kept_secret
from fedring.client.protection import Protection
from fedring.client.secure.client import SecureAggregationClient
from fedring.client.session.inbox import Assignment, EvaluationOrder
from fedring.client.session.link import ServerLink
from fedring.client.task import Task
from fedring.client.transfer.delivery import Delivery
from fedring.client.transfer.fetch import ModelFetcher
from fedring.client.transfer.spool import Spool
from fedring.client.transforms.chosen import unknown_in
from fedring.daemon.config import load_config
from fedring.daemon.lock import StateLock
from fedring.daemon.metrics import serving
from fedring.job_code import OwnError
from fedring.offers import PARTS
from fedring.privacy.account import NoAccountant
from fedring.rpc.tls import ends_at
from fedring.train.errors import failure_detail, failure_reason
from fedring.train.evaluation import NO_SAMPLES, Counts, counts_of
from fedring.train.jobs.job_table import TrainingMode
from fedring.train.jobs.modes import MODES
from fedring.train.tensors.arrays import Arrays
from fedring.v1 import federation_pb2 as pb
from fedring.version import SOFTWARE

log = logging.getLogger(__name__)

_FLUSH_SECONDS = 1.0

Evaluate = Callable[[Evaluation], Counts]
Model = TypeVar("Model", bound=nn.Module | Arrays)


def connect(
    config: ClientConfig | None = None,
    *,
    model: Model | None = None,
    evaluate: Callable[[Model], Counts | tuple[int | None, int, float] | Mapping[str, float]] | None = None,
    **overrides: Any,
) -> "Federation":
    """Connect to a server, and return a federation for use within `with`.

    Give `model` and `evaluate` to take part in the evaluation of published models.

    Args:
        config: The configuration; None = from the environment.
        model: The torch module, or the numpy arrays by name, that are filled with the published model before each call
            of `evaluate`.
        evaluate: Returns the counts (correct, total, sum of losses) of the model on samples of this client; `correct`
            is None where accuracy is not defined. Or a mapping of "num_samples", the mean "loss", optionally
            "accuracy", and any further metrics.
        overrides: Keys of the configuration, such as server="fl.example.org:8443"; they take precedence.

    Raises:
        ConfigError: If the configuration is wrong, or the state folder cannot be used.
        ValueError: If `evaluate` was given without `model`.
    """
    if evaluate and model is None:
        raise ValueError("evaluate needs the model to evaluate: connect(..., model=model)")
    given = config.model_dump(exclude_unset=True) if config else {}
    loaded = load_config(ClientConfig, flags=given | overrides)

    def count(evaluation: Evaluation) -> Counts:
        if evaluate is None or model is None:
            return Counts()
        evaluation.load_into(model)
        return counts_of(evaluate(model))

    return Federation(loaded.config, on_evaluate=count if evaluate else None)


class Federation:
    """Yields a Task for each round, until it is closed.

    SIGTERM ends the iteration too. Use it within `with`. The iteration raises Refused if the server has refused this
    client for good.

    Args:
        config: The configuration.
        on_evaluate: Evaluates a published model; None = this client does not evaluate.
        modes: The modes of jobs that this client can train in.
        tell: Is called with a sentence for people whenever the state of the session changes.

    Raises:
        ConfigError: If the state folder or an address cannot be used.
    """

    def __init__(
        self,
        config: ClientConfig,
        *,
        on_evaluate: Evaluate | None = None,
        modes: Container[str] = ("federated",),
        tell: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self.config = config
        self._on_evaluate = on_evaluate
        self._modes = modes
        metrics = ClientMetrics()
        metrics.spool_bytes.set_function(lambda: self._spool.size)
        metrics.certificate_expiry.set_function(lambda: ends_at(config.tls) or nan)
        metrics.sample_epsilon.set_function(self._sample_epsilon)
        with ExitStack() as stack:
            stack.enter_context(StateLock(config.state_dir, client=config.client_id))
            check_policy(config.privacy)
            # It deletes what another client in this folder may be writing.
            self._spool = Spool(config.state_dir, config.client_id, metrics.dropped_files.inc, config.audit)
            self._secret = kept_secret(config.state_dir)
            own: dict[str, str] = {part: getattr(config, part) for part in PARTS}
            self._consent = Consent(config.approval, config.state_dir, config.trusted, own, _orders_of(config))
            # All that may end the start comes before the session: the server would give a round to a client that ends.
            self._secure = SecureAggregationClient(config, self._spool.ledger, self._secret, self._consent.permits)
            if address := stack.enter_context(serving(config.metrics_listen, metrics.registry)):
                log.info("Prometheus can read metrics at %s", address, extra={"metrics": address})
            self._link = ServerLink(config, metrics, evaluates=on_evaluate is not None, tell=tell)
            self._link.session.unapproved = self._consent.waiting
            stack.callback(self._spool.audit.close)
            start = {"side": "client", "client": config.client_id, "software": SOFTWARE, "server": config.server}
            self._spool.audit.try_to_note("start", **start)
            stack.callback(self._spool.audit.try_to_note, "stop")
            self._resources = stack.pop_all()
        models = ModelFetcher(self._link.connection, self._link.session.advance)
        self._loader = ModelLoader(self._link, models, self._spool.kept, config.private)
        self._delivery = Delivery(self._link, self._spool)
        self._secure.start(self._link)
        self._task: Task | None = None
        self._zeroed = 0  # rounds that have failed without a word to the server
        self._signal_taken = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_signal)
            self._signal_taken = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if isinstance(error, Exception) and not isinstance(error, Refused):
                self._tell_failure(error)
        finally:
            failed = self._zeroed + (self._task is not None and self._task.end.result == "zeroed")
            if failed:
                log.error("%d rounds have failed at this client, and the server got zeros for them", failed)
            self._link.close()
            self._link.join()
            self._resources.close()
            if self._signal_taken:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def __iter__(self) -> Iterator[Task]:
        return self

    def __next__(self) -> Task:
        """Wait for the next round, and return its task.

        A task that was not submitted is reported as failed.
        """
        if self._task and not self._task.end.done and not self._task.cancelled:
            self._task.fail("no_update", "the training ended without an update")
        if self._task:
            self._task.end.leave()
            self._link.metrics.finished(self._task.end.result, self._task.end.train_seconds)
            self._zeroed += self._task.end.result == "zeroed"
        before, self._task = self._task, None
        session = self._link.session
        try:
            # The server waits to learn this of a client whose round has ended without it.
            if session.occupied or (before and before.cancelled):
                self._link.call(session.free)
            while True:
                session.begin(pb.ACTIVITY_UNSPECIFIED)
                session.set_reporting(True)
                work = self._link.call(lambda: session.inbox.take())
                if isinstance(work, EvaluationOrder):
                    self._evaluate(work)
                elif (task := self._task_for(work)) is not None:
                    session.occupy(task.round, task.job.job_id)
                    session.set_reporting(False)  # the caller's code may never call progress()
                    return task
        except FederationClosed:
            raise StopIteration from None

    def _task_for(self, work: Assignment) -> Task | None:
        """Return the task of a round, or None.

        If there is nothing to train, an update in the spool has answered it, or the server is told why not.
        """
        work.withdrawn = partial(self._consent.withdrawn, work.command)
        unapproved = self._consent.refusal(work.command)
        why = refusal(self.config.privacy, self._spool.ledger, work.command)
        protection = self._secure.protection(work)
        try:
            send = not unapproved and self._may_send(work.command, protection)
            settled = self._delivery.settle(work, send=send)
        except OSError as error:  # What became of the update is found out with the next round.
            log.error("round %d: the spooled update stays, as the disk fails: %s", work.command.round, error)
            self._task = self._task_of(work, protection)
            self._task.fail("disk_failed", f"OSError: {error}")
            return None
        if settled:
            return None
        self._task = task = self._task_of(work, protection)
        mode, private = task.job.mode, self.config.private
        if private and mode != "federated":
            text = f"this client keeps private = {list(private)} to itself, which the mode {mode} cannot do"
            self._turn_down(task, "private_tensors", text)
        elif unapproved:
            self._turn_down(task, unapproved.reason, unapproved.text)
        elif why:
            self._note("refuses", work.command, reason="privacy_policy")
            self._refuse(task, why)
        elif unknown := unknown_in(work.command.job):
            self._turn_down(task, "unknown_transform", unknown)
        elif protection.has_lost_update():
            task.end.failed()
        elif mode not in self._modes:
            self._turn_down(task, "unknown_mode", f"this client does not train in the mode {mode!r}")
        elif self._begin(task):
            return task
        return None

    def _begin(self, task: Task) -> bool:
        """Note that a round is trained, before its code runs.

        Returns whether that was possible."""
        try:
            signed = self._consent.follow()
        except OSError as error:
            task.fail("disk_failed", f"OSError: {error}")
            return False
        task.permit = self._consent.permit
        spent = self._spool.ledger.epsilons(task.command, self.config.privacy.delta) if self._spool.audit.on else {}
        self._note("trains", task.command, card=self._consent.card, **signed, **spent)
        return True

    def _task_of(self, work: Assignment, protection: Protection) -> Task:
        spool, name = self._spool, self.config.client_id
        return Task(work, self._link, self._loader, spool, name, secret=self._secret, protection=protection)

    def _turn_down(self, task: Task, reason: str, text: str) -> None:
        self._note("refuses", task.command, reason=reason)
        task.fail(reason, text)

    def _refuse(self, task: Task, why: str) -> None:
        if failed_too_often(self.config.privacy, self._spool.ledger, task.command):
            log.error("round %d of job %d is refused: %s", task.round, task.job.job_id, why)
            try:
                self._spool.ledger.note_told(task.command, time.time())
            except OSError as error:
                log.error("the account cannot be written, so the server does not learn this: %s", error)
                task.fail("disk_failed", "the log of this client says more")
            else:
                task.fail("failed_rounds", why)
        else:
            task.fail("privacy_policy", why)

    @property
    def ids(self) -> dict[str, object]:
        """The current round, if there is one, for log lines."""
        if (task := self._task) is not None:
            return {"round": task.round}
        current = self._link.session.inbox.current
        return {"round": current.command.round} if current is not None and not current.end_reason else {}

    def close(self) -> None:
        """End the iteration and the current task.

        Any thread and any signal handler may call this.
        """
        self._link.close()

    def _may_send(self, command: pb.TrainCmd, protection: Protection) -> bool:
        """Return whether an update in the spool may answer a command.

        The site's limit may be reached, and this update charged. And a protection may cover one payload only.
        """
        spooled = self._spool.pending()
        if spooled is None or refusal(self.config.privacy, self._spool.ledger, command, update=spooled.offer.name):
            return False
        return protection.may_send(spooled.offer.payload_digest)

    def _sample_epsilon(self) -> float:
        try:
            return self._spool.ledger.sample_epsilon(self.config.privacy.delta)
        except NoAccountant:
            return nan

    def _evaluate(self, order: EvaluationOrder) -> None:
        if self._on_evaluate is None:
            return
        command, counts, why = order.command, Counts(), ""
        self._link.session.occupy(command.round, command.job.job_id)
        try:
            self._allow_to_evaluate(command)
            self._note("evaluates", command, **self._consent.follow())
            counted = self._on_evaluate(Evaluation(order, self._link, self._loader, self._spool.kept))
            self._allow_to_evaluate(command)  # again: an approval may have been revoked meanwhile
            counts = counted
            staged = MODES.get(command.job.mode, TrainingMode).staged  # only the last stage of a pipeline has counts
            why = "" if staged or counts.total or counts.warnings else NO_SAMPLES
        except Refused:
            raise
        except Exception as error:  # the user's function may raise anything; the next model may suit it
            why = failure_detail(error)
            level = logging.DEBUG if isinstance(error, OwnError) else logging.ERROR
            log.log(level, "an evaluation has failed", exc_info=True)
        finally:
            report = report_of(command, counts, why)
            self._link.metrics.evaluated(report.total > 0)
            self._link.call(self._link.session.free)
            self._link.call(lambda: self._link.session.report_evaluation(report))

    def _allow_to_evaluate(self, command: pb.EvaluateCmd) -> None:
        """Check that this client may evaluate for a command.

        Raises:
            RoundOver: It may not, which is noted.
        """
        reason, text = "privacy_policy", "neither noise nor masks cover what this client would count"
        if may_count(self.config.privacy, command.job):
            if (unapproved := self._consent.refusal_to_evaluate(command)) is None:
                return
            reason, text = unapproved.reason, unapproved.text
        self._note("refuses", command, reason=reason, asked="evaluates")
        raise RoundOver(reason, text)

    def _note(self, what: str, command: pb.TrainCmd | pb.EvaluateCmd, **facts: str | float) -> None:
        self._spool.audit.try_to_note(what, **_names(command), **facts)

    def _tell_failure(self, error: Exception) -> None:
        """Report that the task's code has failed.

        The server then does not wait for its update.
        """
        if self._task and not self._task.end.done:
            try:
                covered = is_covered(self._task.command)
                self._task.fail(failure_reason(error), type(error).__name__ if covered else failure_detail(error))
                self._link.call(lambda: self._link.session.flush(_FLUSH_SECONDS))
            except (FederationClosed, Refused):
                pass  # The end of the session tells the server.

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.close()


def _orders_of(config: ClientConfig) -> Orders | None:
    """Return the memory of signed jobs.

    None if the site asks for no signature.
    """
    allowed = config.approval.allowed_operators
    return Orders(Operators(allowed, config.tls), config.labels, config.state_dir) if allowed else None


def _names(command: pb.TrainCmd | pb.EvaluateCmd) -> dict[str, Any]:
    """Return the names of a command for the client's log."""
    job = command.job
    names = {"job": job.job_id, "name": job.name, "round": command.round, "model": command.model_digest}
    return {**names, "promises": promises_of(job)}
