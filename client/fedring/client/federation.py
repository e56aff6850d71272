"""The way in: `connect` to a server, take tasks from it, give updates back."""

import logging
import signal
import threading
from collections.abc import Callable, Container, Iterator
from contextlib import ExitStack
from math import nan
from types import FrameType, TracebackType
from typing import Any, Self

from torch import nn

from fedring.client.config import ClientConfig
from fedring.client.errors import FederationClosed, Refused, RoundOver
from fedring.client.metrics import ClientMetrics
from fedring.client.session.inbox import EvaluationOrder
from fedring.client.session.link import ServerLink
from fedring.client.task import Evaluation, Task
from fedring.client.transfer.delivery import Delivery
from fedring.client.transfer.fetch import ModelFetcher
from fedring.client.transfer.spool import Spool
from fedring.daemon.config import load_config
from fedring.daemon.lock import StateLock
from fedring.daemon.metrics import serving
from fedring.rpc.contract import MAX_FIGURE
from fedring.rpc.tls import ends_at
from fedring.train.evaluation import Counts
from fedring.v1 import federation_pb2 as pb

log = logging.getLogger(__name__)

_FLUSH_SECONDS = 1.0

Evaluate = Callable[[Evaluation], Counts]


def connect(
    config: ClientConfig | None = None,
    *,
    model: nn.Module | None = None,
    evaluate: Callable[[nn.Module], Counts | tuple[int, int, float]] | None = None,
    **overrides: Any,
) -> "Federation":
    """A federation to iterate over, within `with`; `overrides` are keys of the configuration, such as server=.

    Give `evaluate`, which counts (correct, total, sum of losses), and the `model` to fill before each call of it, to
    take part in the evaluation of published models.
    """
    if evaluate and model is None:
        raise ValueError("evaluate needs the model that it is to be called with: connect(..., model=model)")
    given = config.model_dump(exclude_unset=True) if config else {}
    loaded = load_config(ClientConfig, flags=given | overrides)

    def count(evaluation: Evaluation) -> Counts:
        if evaluate is None or model is None:
            return Counts()
        evaluation.load_into(model)
        counts = evaluate(model)
        return counts if isinstance(counts, Counts) else Counts(*counts)

    return Federation(loaded.config, on_evaluate=count if evaluate else None)


class Federation:
    """Yields a Task for each round, for ever, until it is closed or the process gets SIGTERM.

    Refused is raised if the server will not have this client, ConfigError if its state folder cannot be used.
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
        self._modes = modes  # that its tasks may have
        self._spool = Spool(config.state_dir)
        metrics = ClientMetrics()
        metrics.spool_bytes.set_function(lambda: self._spool.size)
        metrics.certificate_expiry.set_function(lambda: ends_at(config.tls) or nan)
        with ExitStack() as stack:
            stack.enter_context(StateLock(config.state_dir))
            if address := stack.enter_context(serving(config.metrics_listen, metrics.registry)):
                log.info("Prometheus can read metrics at %s", address, extra={"metrics": address})
            self._link = ServerLink(config, metrics, evaluates=on_evaluate is not None, tell=tell)
            self._held = stack.pop_all()
        self._models = ModelFetcher(self._link.connection, self._link.session.advance)
        self._delivery = Delivery(self._link, self._spool)
        self._task: Task | None = None
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
            self._link.close()
            self._link.join()
            self._held.close()
            if self._signal_taken:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def __iter__(self) -> Iterator[Task]:
        return self

    def __next__(self) -> Task:
        """The next round's task; waits for it as long as it takes."""
        if self._task and not self._task.done and not self._task.cancelled:
            self._task.fail("no_update", "the training ended without an update")
        if self._task:
            self._task.leave()
            self._link.metrics.finished(self._task.result, self._task.train_seconds)
        self._task = None
        try:
            while True:
                self._link.session.begin(pb.ACTIVITY_UNSPECIFIED)
                work = self._link.call(lambda: self._link.session.inbox.take())
                if isinstance(work, EvaluationOrder):
                    self._evaluate(work)
                elif not self._delivery.settle(work):
                    self._task = Task(work, self._link, self._models, self._spool, self.config.client_id)
                    if self._task.job.mode in self._modes:
                        return self._task
                    self._task.fail("unknown_mode", f"this client does not train in the mode {self._task.job.mode!r}")
        except FederationClosed:
            raise StopIteration from None

    @property
    def ids(self) -> dict[str, object]:
        """The round in hand, if there is one, for logs."""
        current = self._link.session.inbox.current
        if current is None or (current.end_reason and self._task is None):
            return {}
        return {"round": current.command.round}

    def close(self) -> None:
        """End the iteration, and the task in hand; may be called from any thread, and from a signal handler."""
        self._link.close()

    def _evaluate(self, order: EvaluationOrder) -> None:
        if self._on_evaluate is None:
            return
        counts = Counts()
        try:
            counts = self._on_evaluate(Evaluation(order, self._link, self._models))
            if not abs(counts.loss_sum) <= MAX_FIGURE:
                log.warning("model %d has no score here: its loss is %g", order.command.model_version, counts.loss_sum)
                counts = Counts()  # the server would refuse it, and wait for another
        except RoundOver as over:
            log.warning("model %d was not evaluated: %s", order.command.model_version, over)
        finally:
            report = pb.EvaluationReport(
                round=order.command.round,
                model_digest=order.command.model_digest,
                correct=counts.correct,
                total=counts.total,
                loss_sum=counts.loss_sum,
            )
            self._link.call(lambda: self._link.session.report_evaluation(report))

    def _tell_failure(self, error: Exception) -> None:
        """The server need not wait for a task whose code has failed."""
        if self._task and not self._task.done:
            try:
                self._task.fail("train_error", f"{type(error).__name__}: {error}")
                self._link.call(lambda: self._link.session.flush(_FLUSH_SECONDS))
            except (FederationClosed, Refused):
                pass  # it learns from the end of the session

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.close()
