"""A round to train in, as the user's code sees it."""

import logging
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn

from fedring.client.answer import Answers, StartedRound, check_size
from fedring.client.errors import BadModel, Refused, RoundOver, UpdateRefused, WrongModel
from fedring.client.loading import Loaded, ModelLoader, is_spoiled
from fedring.client.metrics import ClientMetrics
from fedring.client.policy.promises import is_covered
from fedring.client.round_plan import plan_of
from fedring.client.secure.client import SecureAggregationClient
from fedring.client.session.inbox import Assignment
from fedring.client.session.link import ServerLink
from fedring.client.transfer.delivery import Delivery
from fedring.client.transfer.own_values import PERSONAL, line_of, values_in
from fedring.client.transfer.partial import PartialDownload, Sink
from fedring.client.transfer.residual import RESIDUAL, Residual
from fedring.client.transfer.spool import Spool
from fedring.client.transfer.update import TrainingReport, offer_of
from fedring.codec import CodecError
from fedring.codec.schema import Schema
from fedring.privacy.account import SampledSteps
from fedring.secure.errors import SecureError
from fedring.train.plan import Plan
from fedring.train.tensors.arrays import Arrays, as_module
from fedring.train.tensors.state import fill, schema_of
from fedring.v1 import federation_pb2 as pb

if TYPE_CHECKING:
    from fedring.workers.assembly import AssembledModel  # imports torch.distributed's collectives

log = logging.getLogger(__name__)

_NO_NOISE = "the job has [sample_dp], and only the training of fl-client adds its noise"


class Task:
    """One round: load the model, train it, and submit it.

    `Federation` makes tasks; users do not.

    Attributes:
        command: What the server has sent.
        link: The session to the server.
        done: Whether the task was submitted, has failed, or was refused.
        result: What became of it, one of `fedring.client.metrics.RESULTS`.
        train_seconds: How long the training took; None = it was not trained to its end.
        ledger: The account of what this client has spent of its privacy.
        charged: Whether a training with DP-SGD was charged, which a job with [sample_dp] demands of what is submitted.
    """

    def __init__(
        self,
        assignment: Assignment,
        link: ServerLink,
        loader: ModelLoader,
        spool: Spool,
        client_id: str,
        *,
        secure: SecureAggregationClient,
    ) -> None:
        self.command, self.link = assignment.command, link
        self.done = False
        self.result = "over"
        self.train_seconds: float | None = None
        self.ledger = spool.ledger
        self.charged = False
        self._assignment, self._loader, self._spool = assignment, loader, spool
        self._delivery = Delivery(link, spool)
        self._client_id = client_id
        self._secure = secure
        self._started: StartedRound | None = None
        self._loaded_at = 0.0
        self._samples = 0  # that this client's updates count for, if that is known
        self._tells_progress = False
        self._answers = Answers(assignment, link, spool, client_id, secure, self._delivery)
        self._corrections: Mapping[str, Tensor] | None = None
        self._corrected = False

    @property
    def round(self) -> int:
        """The number of the round, unique in the run and rising."""
        return self.command.round

    @property
    def job(self) -> pb.JobSpec:
        """The job, with its mode."""
        return self.command.job

    @property
    def plan(self) -> Plan:
        """The job's plan of training: epochs, batch size, learning rate, seed."""
        plan = plan_of(self.command, self._client_id, self._secure.secret)
        return self._started.round_.plan(plan) if self._started else plan

    @property
    def metrics(self) -> ClientMetrics:
        """The metrics of this client."""
        return self.link.metrics

    @property
    def cancelled(self) -> bool:
        """Whether the round has ended, so that further training would be wasted."""
        return bool(self._assignment.stop_reason)

    def load_into(self, model: nn.Module | Arrays, *, samples: int = 0) -> None:
        """Load the values that this round starts from into `model`.

        Private tensors get the values of this client's newest accepted update. Before there is one, they get those
        that they had when a model was loaded into `model` for the first time; frozen tensors keep theirs.

        Args:
            model: A torch module, or numpy arrays of floats by name, which are filled in place.
            samples: How many samples this client trains on. If it fails in a job whose updates are masked, and counted
                by their samples, it counts for so many all the same. 0 = for as many as in its last update of the job.

        Raises:
            WrongModel: If the model shares other tensors than those that are trained, or has other frozen values. The
                server has been told, and the round goes on without this client.
            RoundOver: If the round has ended, or the model cannot be fetched.
        """
        try:
            loaded = self._load(model, self._answers.waiting())
            if is_spoiled(loaded):
                self._spool.kept.forget(line_of(self.command).key, RESIDUAL)
                log.warning("dropped the residual of past updates: it is far larger than the model")
                loaded = self._load(model, None)
        except WrongModel as error:
            self.fail(error.reason, error.detail)
            raise
        self._started = self._answers.begin(loaded, self._loader.models)
        self._corrections = self._started.round_.corrections()
        self._samples = samples
        self._loaded_at = time.perf_counter()
        self.link.session.begin(pb.ACTIVITY_TRAINING)

    def start_again(self, model: nn.Module) -> None:
        """Restore the module's starting values, except for private tensors."""
        loaded = self._started_round().loaded
        fill(model, loaded.parts.shared, loaded.start.vectors)

    @property
    def corrections(self) -> Mapping[str, Tensor] | None:
        """The corrections to each step's gradients, by the parameters' names.

        None unless the job's algorithm corrects gradients. It is known when a model was loaded. A training that does
        not ask for it cannot be submitted.
        """
        self._corrected = True
        return self._corrections

    def load_own(self) -> Mapping[str, Tensor] | None:
        """Return the tensors of this client's own model.

        They are those after its newest accepted update; None if there are none.

        Raises:
            WrongModel: If nothing was loaded for this round.
        """
        line = line_of(self.command)
        return values_in(self._spool.kept.load(line.key), PERSONAL, line, self.not_frozen)

    @property
    def not_frozen(self) -> Schema:
        """The tensors of the loaded model that training may change."""
        return self._started_round().loaded.parts.not_frozen

    def check_model(self, model: nn.Module) -> None:
        """Compare a model's schema with that of the round's model.

        The model may be without values.

        Raises:
            WrongModel: If it has another schema than the one that is trained. The server has been told, and the round
                goes on without this client.
            RoundOver: If the round has ended, or the server does not say what the other schema is.
        """
        schema = schema_of(model)
        if schema.hash != self.command.schema_hash:
            self.fetch(schema, [entry.name for entry in schema.entries], lambda entry, start, values: None)
        self.link.session.begin(pb.ACTIVITY_TRAINING)

    def fetch(self, schema: Schema, names: Collection[str], sink: Sink) -> None:
        """Fetch some tensors of the round's model, and nothing else.

        Args:
            schema: The schema of the whole model.
            names: The tensors.
            sink: Takes their values; after an error on the way, they are sent again.

        Raises:
            WrongModel: As check_model() raises it.
            RoundOver: If the round has ended, or the model cannot be fetched.
        """
        digest, assignment = self.command.model_digest, self._assignment
        self.link.session.begin(pb.ACTIVITY_FETCHING)
        try:
            what, ended = f"a part of model {digest}", lambda: assignment.stop_reason
            download = self._loader.models.download
            self.link.call(lambda: download(what, lambda: PartialDownload(digest, schema, names, sink), ended))
        except WrongModel as error:
            self.fail(error.reason, error.detail)
            raise
        except BadModel as error:  # Another round may go better.
            self.fail("bad_model", str(error))
            raise RoundOver("bad_model", str(error)) from error
        self.link.session.begin(pb.ACTIVITY_TRAINING)

    def progress(self, share: float) -> None:
        """Report the finished share of the training, 0 to 1.

        The operator sees it. From the first call to the end of the round, a client that reports nothing new for the
        job's stalled_after_seconds counts as stalled. A training that never calls this may take until the deadline.
        """
        self._tells_progress = True
        self.link.session.set_reporting(True)
        self.link.session.advance(share)

    def submit(
        self,
        model: nn.Module | Arrays,
        samples: int,
        metrics: Mapping[str, float] | None = None,
        train_seconds: float | None = None,
        *,
        own: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Send the trained model, and return once the server accepts it.

        Args:
            model: The model that was given to `load_into`, trained; or arrays with the same names and shapes.
            samples: How many samples it was trained on, at least 1.
            metrics: Figures of the training, by name; at most 32.
            train_seconds: How long the training took; None = since `load_into`.
            own: The tensors of a model of this client's own, by name: all that training may change. They never leave
                the client, which keeps them once the update is accepted.

        Raises:
            RoundOver: If the round has ended without this update.
            UpdateRefused: If the server has refused the update, or it cannot be sent.
            WrongModel: If nothing was loaded, or the model has another schema than the one that was loaded, or its
                frozen tensors were changed.
            ValueError: If a figure is out of range.
        """
        started = self._started_round()
        seconds = time.perf_counter() - self._loaded_at if train_seconds is None else train_seconds
        training = TrainingReport(samples, seconds, metrics or {})
        if self._corrections is not None and not self._corrected:
            detail = "the job corrects gradients, and this training has not used the task's corrections"
            self.fail("no_correction", detail)
            raise UpdateRefused("no_correction", detail)
        if self.job.sample_dp and not self.charged:
            self.fail("no_sample_dp", _NO_NOISE)
            raise UpdateRefused("no_sample_dp", _NO_NOISE)
        self.train_seconds, self.done = seconds, True
        if reason := self._assignment.stop_reason:
            raise RoundOver(reason)
        self.link.session.set_reporting(True)
        try:
            self._deliver(as_module(model), started, training, own)
            self.result = "accepted"
        except UpdateRefused:
            if self.result != "zeroed":
                self.result = "refused"
            raise
        except RoundOver:
            raise
        except Exception:  # such as a full disk: then whoever handles it reports a failure
            self.done = self._answers.sent
            raise

    def submit_file(
        self, assembled: "AssembledModel", samples: int, metrics: Mapping[str, float], train_seconds: float
    ) -> None:
        """Send a trained model that is a file.

        This returns once the server has accepted it.

        Args:
            assembled: The file, which this moves to the spool.
            samples, metrics, train_seconds: As for submit().

        Raises:
            RoundOver: If the round has ended without this update.
            UpdateRefused: If the server has refused the update.
            ValueError: If a figure is out of range.
        """
        training = TrainingReport(samples, train_seconds, metrics)
        self.train_seconds, self.done = train_seconds, True
        if reason := self._assignment.stop_reason:
            raise RoundOver(reason)
        spooled = None
        try:
            check_size(self.command, sum(size for _, _, size in assembled.packets))
            offer = offer_of(self.command, self._client_id, assembled.packets, assembled.payload_digest, training)
            spooled = self._spool.adopt(offer, assembled.path)
            self._delivery.send(spooled, self._assignment)
            self.result = "accepted"
        except UpdateRefused as error:
            if spooled is None:
                self.fail(error.reason, error.detail)
            self.result = "refused"
            raise

    @property
    def update_file(self) -> Path:
        """Where to write the payload of an update for submit_file()."""
        return self._spool.payload_part

    def charge(self, spent: SampledSteps) -> None:
        """Charge a training with DP-SGD durably.

        This comes before anything of it may leave this client.
        """
        if not self.ledger.has_charged(self.command):  # no noise of this job may cover what is left from before it
            self._spool.kept.forget(line_of(self.command).key, RESIDUAL)
        self.ledger.charge_samples(self.command, spent)
        self.charged = True

    def stand_aside(self, train_seconds: float) -> None:
        """Note that another worker of the group delivers the model.

        Args:
            train_seconds: How long this worker has trained.
        """
        self.done = True
        self.train_seconds = train_seconds
        if self.result == "over":
            self.result = "trained"
        self.link.session.begin(pb.ACTIVITY_UNSPECIFIED)

    def fail(self, reason: str, detail: str, *, noise: nn.Module | None = None) -> None:
        """Report that this client has no update for this round.

        If masks or noise cover what clients send in the job, and a model was loaded, the server is not told: which
        clients fail, and how, may depend on their samples. It gets an update that changes nothing, with the full weight
        of this client, and the reason stays in this client's log. This returns once the server has accepted it, or the
        round has ended.

        Args:
            reason: A stable word.
            detail: A sentence for people.
            noise: The model after a training with noise and without samples, which is sent then; None = zeros are.
        """
        if self._started is None or not is_covered(self.command):
            self._tell(reason, detail)
        elif self.job.sample_dp and not self.charged:  # whatever has failed was not the training of fl-client
            self._tell("no_sample_dp", _NO_NOISE)
        elif not self._answers.sent:
            self._send_nothing(self._started, reason, noise)

    def fail_secure(self, error: SecureError) -> None:
        """Report that this client leaves the round's secure aggregation."""
        self.done, self.result = True, "failed"
        self.link.session.begin(pb.ACTIVITY_UNSPECIFIED)
        self._secure.fail(self.command, error)

    def leave(self) -> None:
        """End the work on the round.

        If the server asks for the round again after this, it is trained anew.
        """
        mine = self._assignment
        if not (mine.undelivered or mine.accepted_name or mine.failure):
            mine.end_reason = mine.stop_reason

    def _load(self, model: nn.Module | Arrays, left_out: Residual | None) -> Loaded:
        return self._loader.load(self.command, model, ended=lambda: self._assignment.stop_reason, left_out=left_out)

    def _started_round(self) -> StartedRound:
        if self._started is None:
            raise WrongModel("nothing was loaded for this round: call load_into before the training")
        return self._started

    def _tell(self, reason: str, detail: str) -> None:
        self.done, self.result = True, "failed"
        self.link.session.begin(pb.ACTIVITY_UNSPECIFIED)
        self._delivery.fail(self._assignment, reason, detail)

    def _send_nothing(self, started: StartedRound, reason: str, noise: nn.Module | None) -> None:
        """Deliver an update that changes nothing.

        Errors in that may be told, as no sample causes them.
        """
        log.error("round %d: the server gets an update that changes nothing, and not why (%s)", self.round, reason)
        self.done, self.result = True, "zeroed"
        self.metrics.hide(reason)
        if self._tells_progress:  # Heartbeats would tell where it has failed, until all peers are known.
            self.progress(1.0)
        self.link.session.set_reporting(True)
        try:
            self.ledger.note_failed(self.command)
            if over := self._assignment.stop_reason:
                raise RoundOver(over)
            samples = self._samples or self.ledger.note_of(self.command).samples or 1
            self._answers.send(self._answers.nothing(started, noise, samples))
        except SecureError as error:
            self.fail_secure(error)
        except RoundOver as error:
            log.warning("round %d takes no update from this client: %s", self.round, error)
            if isinstance(error, UpdateRefused) and not self._answers.sent:
                self._tell(error.reason, error.detail)
        except Refused:
            raise
        except Exception as error:  # such as a full disk: it must not end the client
            log.exception("round %d: the update that changes nothing cannot be sent", self.round)
            self._tell("disk_failed" if isinstance(error, OSError) else "internal", "the log of this client says more")

    def _deliver(
        self, model: nn.Module, started: StartedRound, training: TrainingReport, own: Mapping[str, Tensor] | None
    ) -> None:
        try:
            answer = self._answers.trained(started, model, training, own)
        except SecureError as error:
            self.fail_secure(error)
            raise UpdateRefused(error.reason, str(error)) from error
        except CodecError as error:
            self.fail(error.reason, f"the trained model cannot be sent: {error}")
            raise UpdateRefused(error.reason, "the trained model cannot be sent") from error
        except (WrongModel, UpdateRefused) as error:
            self.fail(error.reason, error.detail)
            raise
        if is_covered(self.command):
            self.ledger.note_trained(self.command, training.samples)
        self._answers.send(answer)
