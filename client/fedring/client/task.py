"""A round to train in, as the user's code sees it."""

import logging
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn

from fedring.client.answer import Answers, StartedRound
from fedring.client.consent.orders import Permit
from fedring.client.errors import Refused, RoundOver, UpdateRefused, WrongModel
from fedring.client.loading import Loaded, ModelLoader, differs_from, is_spoiled
from fedring.client.policy.promises import is_covered
from fedring.client.policy.secret import ClientSecret
from fedring.client.protection import CannotProtect, Protection
from fedring.client.round_end import RoundEnd
from fedring.client.round_plan import plan_of
from fedring.client.session.inbox import Assignment
from fedring.client.session.link import ServerLink
from fedring.client.transfer.own_values import PERSONAL, line_of, values_in
from fedring.client.transfer.residual import RESIDUAL
from fedring.client.transfer.sample_charge import SampleCharge
from fedring.client.transfer.spool import Spool
from fedring.client.transfer.update import TrainingReport
from fedring.codec import CodecError
from fedring.train.plan import Plan
from fedring.train.tensors.arrays import Arrays, as_module
from fedring.v1 import federation_pb2 as pb

if TYPE_CHECKING:
    pass  # imports torch.distributed's collectives

log = logging.getLogger(__name__)

_NO_NOISE = "no_sample_dp", "the job has [sample_dp], and only the training of fl-client adds its noise"
_NO_CORRECTION = (
    "no_correction",
    "the job corrects gradients, and this training has not used the task's corrections",
)
"""Why a training may not be submitted: the reason, and a sentence."""


class Task:
    """One round: load the model, train it, and submit it.

    `Federation` makes tasks; users do not.

    Attributes:
        command: What the server has sent.
        link: The session to the server.
        models: What fetches the round's model.
        ledger: The account of what this client has spent of its privacy.
        charge: The charge of a training with the noise of [sample_dp].
        end: What becomes of the round here.
        permit: The signed job that the round follows from; None if this site asks for no signature.
        first_values: The values of the job's model as it was built here, by the tensors' names, from which the round
            must start; None = any.
    """

    def __init__(
        self,
        assignment: Assignment,
        link: ServerLink,
        loader: ModelLoader,
        spool: Spool,
        client_id: str,
        *,
        secret: ClientSecret,
        protection: Protection,
    ) -> None:
        self.command, self.link, self.models = assignment.command, link, loader.models
        self.ledger = spool.ledger
        self.charge = SampleCharge(self.command, spool)
        self.end = RoundEnd(assignment, link, spool, protection)
        self._loader, self._spool, self._client_id = loader, spool, client_id
        self._secret, self._protection = secret, protection
        self._answers = Answers(assignment, link, spool, client_id, protection)
        self.permit: Permit | None = None
        self.first_values: Mapping[str, Tensor] | None = None
        self._started: StartedRound | None = None
        self._loaded_at = 0.0
        self._samples = 0  # that this client's updates count for, if that is known
        self._tells_progress = False
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
        plan = plan_of(self.command, self._client_id, self._secret)
        return self._started.round_.plan(plan) if self._started else plan

    @property
    def cancelled(self) -> bool:
        """Whether the round has ended, so that further training would be wasted."""
        return bool(self.end.reason)

    def load_into(self, model: nn.Module | Arrays, *, samples: int = 0) -> None:
        """Load the values that this round starts from into `model`.

        Private tensors get the values of this client's newest accepted update. Before there is one, they get those
        that they had when a model was loaded into `model` for the first time; frozen tensors keep theirs.

        Args:
            model: A torch module, or numpy arrays of floats by name, which are filled in place.
            samples: How many samples this client trains on. If it fails in a job that hides single updates, and counts
                them by their samples, it counts for so many all the same. 0 = for as many as in its last update of the
                job.

        Raises:
            WrongModel: If the model shares other tensors than those that are trained, or has other frozen values. The
                server has been told, and the round goes on without this client.
            RoundOver: If the round has ended, or the model cannot be fetched.
        """
        load = partial(self._loader.load, self.command, model, ended=lambda: self.end.reason)
        try:
            loaded = load(left_out=self._answers.waiting())
            if is_spoiled(loaded):
                log.warning("dropped the residual of past updates: it is far larger than the model")
                self._spool.kept.forget(line_of(self.command).key, RESIDUAL)
                loaded = load()
        except WrongModel as error:
            self.fail(error.reason, error.detail)
            raise
        if why := self._other_than_signed(model, loaded):
            self.end.tell("other_start", why)
            raise WrongModel(why, "other_start")
        self._started = self._answers.begin(loaded, self.models)
        self._corrections = self._started.round_.corrections()
        self._samples = samples
        self._loaded_at = time.perf_counter()
        self.link.session.begin(pb.ACTIVITY_TRAINING)

    @property
    def started(self) -> StartedRound:
        """The round, with the model that was loaded for it.

        Raises:
            WrongModel: If nothing was loaded.
        """
        if self._started is None:
            raise WrongModel("nothing was loaded for this round: call load_into before the training")
        return self._started

    @property
    def corrections(self) -> Mapping[str, Tensor] | None:
        """The corrections to each step's gradients, by the parameters' names.

        None unless the job's algorithm corrects gradients. It is known when a model was loaded. A training that does
        not ask for it cannot be submitted.
        """
        self._corrected = True
        return self._corrections

    def load_own(self) -> Mapping[str, Tensor] | None:
        """Return copies of the tensors of this client's own model.

        They are those after its newest accepted update; None if there are none.

        Raises:
            WrongModel: If nothing was loaded for this round.
        """
        line, schema = line_of(self.command), self.started.loaded.parts.not_frozen
        own = values_in(self._spool.kept.load(line.key), PERSONAL, line, schema)
        return None if own is None else {name: tensor.clone() for name, tensor in own.items()}

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
        started = self.started
        seconds = time.perf_counter() - self._loaded_at if train_seconds is None else train_seconds
        training = TrainingReport(samples, seconds, metrics or {})
        if why := self._incomplete():
            self.fail(*why)
            raise UpdateRefused(*why)
        self.end.trained(seconds)
        self.link.session.set_reporting(True)
        try:
            self._deliver(as_module(model), started, training, own)
            self.end.result = "accepted"
        except UpdateRefused:
            if self.end.result != "zeroed":
                self.end.result = "refused"
            raise
        except RoundOver:
            raise
        except Exception:  # such as a full disk: then whoever handles it reports a failure
            self.end.done = self.end.sent
            raise

    def fail(self, reason: str, detail: str, *, noise: nn.Module | None = None) -> None:
        """Report that this client has no update for this round.

        If the round is covered (`is_covered`), and a model was loaded, the server is not told: which
        clients fail, and how, may depend on their samples. It gets an update that changes nothing, with the full weight
        of this client, and the reason stays in this client's log. This returns once the server has accepted it, or the
        round has ended.

        Args:
            reason: A stable word.
            detail: A sentence for people.
            noise: The model after a training with noise and without samples, which is sent then; None = zeros are.
        """
        if self._started is None or not is_covered(self.command):
            self.end.tell(reason, detail)
        elif self.charge.missing:  # whatever has failed was not the training of fl-client
            self.end.tell(*_NO_NOISE)
        elif not self.end.sent:
            self._send_nothing(self._started, reason, noise)

    def _other_than_signed(self, model: nn.Module | Arrays, loaded: Loaded) -> str:
        """Return why no operator has signed a loaded model; or nothing."""
        if self.first_values is not None and (name := differs_from(self.first_values, loaded.base)):
            return f"the job was signed to start fresh, and {name} has other values than the job's seed gives"
        if self.permit is not None and self.permit.order.job.sharing.frozen_stay and not loaded.frozen_digest:
            # Without the digest, the server could put values of its own in the place of frozen ones.
            frozen = (name for name, each in as_module(model).named_parameters() if not each.requires_grad)
            if name := next(frozen, ""):
                return f"{name} is frozen, and the server says that no tensor is"
        return ""

    def _incomplete(self) -> tuple[str, str] | None:
        """Return the reason and the sentence that forbid to submit."""
        if self._corrections is not None and not self._corrected:
            return _NO_CORRECTION
        return _NO_NOISE if self.charge.missing else None

    def _send_nothing(self, started: StartedRound, reason: str, noise: nn.Module | None) -> None:
        """Deliver an update that changes nothing.

        Errors in that may be told, as no sample causes them.
        """
        log.error("round %d: the server gets an update that changes nothing, and not why (%s)", self.round, reason)
        end = self.end
        end.done, end.result = True, "zeroed"
        self.link.metrics.hide(reason)
        if self._tells_progress:  # Heartbeats would tell where it has failed, until all peers are known.
            self.progress(1.0)
        self.link.session.set_reporting(True)
        try:
            self.ledger.note_failed(self.command)
            end.check_wanted()
            samples = self._samples or self.ledger.note_of(self.command).samples or 1
            end.send(self._answers.nothing(started, noise, samples))
        except CannotProtect:
            end.failed()
        except RoundOver as error:
            log.warning("round %d takes no update from this client: %s", self.round, error)
            if isinstance(error, UpdateRefused) and not end.sent:
                end.tell(error.reason, error.detail)
        except Refused:
            raise
        except Exception as error:  # such as a full disk: it must not end the client
            log.exception("round %d: the update that changes nothing cannot be sent", self.round)
            end.tell("disk_failed" if isinstance(error, OSError) else "internal", "the log of this client says more")

    def _deliver(
        self, model: nn.Module, started: StartedRound, training: TrainingReport, own: Mapping[str, Tensor] | None
    ) -> None:
        try:
            answer = self._answers.trained(started, model, training, own)
        except CannotProtect:
            self.end.failed()
            raise
        except CodecError as error:
            self.fail(error.reason, f"the trained model cannot be sent: {error}")
            raise UpdateRefused(error.reason, "the trained model cannot be sent") from error
        except (WrongModel, UpdateRefused) as error:
            self.fail(error.reason, error.detail)
            raise
        if is_covered(self.command):
            self.ledger.note_trained(self.command, self._protection.weight(training.samples))
        self.end.send(answer)
