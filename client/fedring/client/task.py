"""What a server asks for, as the user's code sees it: a round to train, a model to evaluate."""

import hashlib
import time
from collections.abc import Callable, Mapping

from torch import nn

from fedring.client.errors import RoundOver, UpdateRefused, WrongModel
from fedring.client.metrics import ClientMetrics
from fedring.client.session.inbox import Assignment, EvaluationOrder
from fedring.client.session.link import ServerLink
from fedring.client.transfer.delivery import Delivery
from fedring.client.transfer.download import HeldModel
from fedring.client.transfer.fetch import ModelFetcher
from fedring.client.transfer.spool import Spool
from fedring.client.transfer.update import TrainingReport, make_update
from fedring.codec import CodecError
from fedring.train.plan import Plan
from fedring.train.state import fill, read_vectors, schema_of
from fedring.v1 import federation_pb2 as pb


class Task:
    """One round: load the model, train it in whatever way, submit it."""

    def __init__(
        self, assignment: Assignment, link: ServerLink, models: ModelFetcher, spool: Spool, client_id: str
    ) -> None:
        self.command = assignment.command
        self.link = link
        self.done = False  # submitted, failed, or refused
        self.result = "over"  # what has become of it (metrics.RESULTS)
        self.train_seconds: float | None = None  # None = it was not trained to its end
        self._assignment = assignment
        self._models = models
        self._spool = spool
        self._delivery = Delivery(link, spool)
        self._client_id = client_id
        self._base: HeldModel | None = None
        self._loaded_at = 0.0

    @property
    def round(self) -> int:
        """The round, unique in the run and rising."""
        return self.command.round

    @property
    def job(self) -> pb.JobSpec:
        """What the job trains."""
        return self.command.job

    @property
    def plan(self) -> Plan:
        """How the job wants it trained."""
        c = self.command
        seed = own_seed(c.seed, self._client_id)
        return Plan(
            c.epochs, c.batch_size, c.lr, c.momentum, c.mu, c.subset_size, seed, round=c.round, job_round=c.job_round
        )

    @property
    def metrics(self) -> ClientMetrics:
        """What this client tells of itself."""
        return self.link.metrics

    @property
    def cancelled(self) -> bool:
        """Whether the round has ended, so that further training is in vain."""
        return bool(self._assignment.stop_reason)

    def load_into(self, model: nn.Module) -> None:
        """Afterwards `model` holds the values that this round starts from; WrongModel names what does not fit."""
        self._base = load(self.link, self._models, self.command, model, ended=lambda: self._assignment.stop_reason)
        self._loaded_at = time.perf_counter()
        self.link.session.begin(pb.ACTIVITY_TRAINING)

    def progress(self, share: float) -> None:
        """Tell the operator that this share of the training is done."""
        self.link.session.advance(share)

    def submit(
        self,
        model: nn.Module,
        samples: int,
        metrics: Mapping[str, float] | None = None,
        train_seconds: float | None = None,
    ) -> None:
        """The server has accepted what `model` learned from `samples` samples; RoundOver if it has not.

        Without `train_seconds`, all the time since `load_into` counts as training.
        """
        if self._base is None:
            raise WrongModel("nothing was loaded for this round: call load_into before the training")
        seconds = time.perf_counter() - self._loaded_at if train_seconds is None else train_seconds
        work = TrainingReport(samples, seconds, metrics or {})
        self.train_seconds = seconds
        if why := self._assignment.stop_reason:
            self.done = True
            raise RoundOver(why)
        self.done = True
        try:
            self._deliver(model, self._base, work)
            self.result = "accepted"
        except UpdateRefused:
            self.result = "refused"
            raise

    def stand_aside(self, train_seconds: float) -> None:
        """Nothing more is to come from this client for the round: one delivers for all."""
        self.done = True
        self.train_seconds = train_seconds
        if self.result == "over":
            self.result = "trained"
        self.link.session.begin(pb.ACTIVITY_UNSPECIFIED)

    def fail(self, reason: str, detail: str) -> None:
        """The server learns, with one stable word and one sentence, that this client has nothing for this round."""
        self.done, self.result = True, "failed"
        self.link.session.begin(pb.ACTIVITY_UNSPECIFIED)
        self._delivery.fail(self._assignment, reason, detail)

    def leave(self) -> None:
        """End the work on the round. If only its time was over, it is begun anew should the server ask for it again."""
        mine = self._assignment
        if not (mine.undelivered or mine.accepted_name or mine.failure):
            mine.end_reason = mine.stop_reason

    def _deliver(self, model: nn.Module, base: HeldModel, work: TrainingReport) -> None:
        command = self.command
        if clause := base.schema.difference(schema_of(model)):
            self.fail("wrong_schema", clause)
            raise WrongModel(f"this is not the model that was loaded: {clause}")
        last = self.link.connection.last_accepted
        residual = self._spool.residual(command.run_id, command.schema_hash, last)
        try:
            update = make_update(command, self._client_id, base, read_vectors(model), work, residual)
        except CodecError as error:
            self.fail(error.reason, f"the trained model cannot be sent: {error}")
            raise UpdateRefused(error.reason, "the trained model cannot be sent") from error
        if (size := sum(map(len, update.parts))) > command.max_update_bytes > 0:
            detail = f"the update has {size} bytes, and at most {command.max_update_bytes} are taken"
            self.fail("too_large", detail)
            raise UpdateRefused("too_large", detail)
        spooled = self._spool.write(update.offer, update.parts, update.residual)
        self._delivery.send(spooled, self._assignment, update.residual)


def own_seed(seed: int, client_id: str) -> int:
    """The round's seed as this client uses it, 0 to 2^63 - 1.

    With one seed for all, clients would draw the same places of their parts. Data sets are ordered (MNIST by writer),
    so that the clients of a round would see the same few writers.
    """
    digest = hashlib.sha256(f"{seed}:{client_id}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


class Evaluation:
    """One published model to evaluate."""

    def __init__(self, order: EvaluationOrder, link: ServerLink, models: ModelFetcher) -> None:
        self.command = order.command
        self._deadline = order.deadline
        self._link = link
        self._models = models

    @property
    def job(self) -> pb.JobSpec:
        """What the job trains."""
        return self.command.job

    def load_into(self, model: nn.Module) -> None:
        """Afterwards `model` holds the values to evaluate; WrongModel names what does not fit."""
        load(self._link, self._models, self.command, model, ended=self._ended)
        self._link.session.begin(pb.ACTIVITY_EVALUATING)

    def _ended(self) -> str:
        return "deadline" if time.monotonic() >= self._deadline else ""


def load(
    link: ServerLink,
    models: ModelFetcher,
    command: pb.TrainCmd | pb.EvaluateCmd,
    model: nn.Module,
    *,
    ended: Callable[[], str],
) -> HeldModel:
    """The model of the command, which `model` holds afterwards; RoundOver once `ended()` says why."""
    schema = schema_of(model)
    link.session.begin(pb.ACTIVITY_FETCHING)
    fetched = models.at_hand(command, schema)
    if fetched is None:
        fetched = link.call(lambda: models.fetch(command.model_digest, schema, ended))
    fill(model, schema, fetched.vectors)
    return fetched
