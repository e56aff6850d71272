"""Training as a job declares it.

It looks up the names in the job, and keeps model and data loaded from round to round.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fedring.client.config import ClientConfig
from fedring.client.errors import Refused, RoundOver, WrongModel
from fedring.client.evaluation import Evaluation
from fedring.client.policy.promises import is_covered
from fedring.client.task import Task
from fedring.client.training.group_training import GroupTraining
from fedring.client.training.job_loading import load_own
from fedring.client.training.local_training import LoadedJob, LocalTraining
from fedring.client.training.personal import with_own
from fedring.client.training.process import CodeFailed, CodeProcess, RemoteTraining, evaluate_remote, load_remote
from fedring.daemon.logs import loggable
from fedring.daemon.tracing import span
from fedring.data import DataError
from fedring.job_code import job_code
from fedring.offers import PARTS, named
from fedring.train.batches import size_of
from fedring.train.device import pick_device, threads_for
from fedring.train.errors import SeamError, TrainError, TrainingStopped, failure_detail, failure_reason
from fedring.train.evaluation import Counts, run_evaluator
from fedring.train.jobs.job_table import TrainingMode
from fedring.train.jobs.modes import MODES
from fedring.train.loop import warm_up
from fedring.train.names.offered import Offered, collect
from fedring.train.plan import TrainResult
from fedring.train.tensors.state import tensors_of
from fedring.v1 import federation_pb2 as pb

log = logging.getLogger(__name__)

_READ = "fl-client had read it: restart fl-client, which still runs the old code, or send it SIGUSR2"
_WRONG_BASE = ("wrong_base", "frozen_changed")
"""The reasons of a WrongModel for which the model has other frozen values: it is built anew for the next round."""


@dataclass(frozen=True, slots=True)
class _Failure:
    """The reason of a failure, without the error, which would keep memory."""

    reason: str
    detail: str
    quoting: str = ""  # the type of an error whose text is in the detail, and may quote a sample; empty = there is none


class DeclaredTrainer:
    """Trains and evaluates with the callables that a job names.

    The configuration must trust them. `main` owns the only one.
    """

    def __init__(self, config: ClientConfig) -> None:
        self._config = config
        self._offered = offered_by(config)
        self._device = pick_device(config.device)
        self._groups = GroupTraining(config, self._offered, self._device)
        self._key = b""
        self._loaded: LoadedJob | None = None
        self._form: object = None  # of its model, as it was built
        self._first: Mapping[str, Tensor] | None = None  # its values then, while rounds must start from them
        self._edited = ""  # what was told of modules that were edited
        self._reached = 0.0  # how far the newest training came
        self.in_users_code = False  # whether a user's trainer or evaluator runs, which may never check whether to stop
        self._process: CodeProcess | None = None  # that runs the code of jobs; None = this one does

    def run_apart(self, process: "CodeProcess") -> None:
        """Let another process run the code of jobs."""
        self._process = process

    def waits_for_code(self, waits: bool) -> None:
        """Note whether another process runs the code of a job right now."""
        self.in_users_code = waits

    def close(self) -> None:
        """End the process of the job's code."""
        if self._process is not None:
            self._process.close()

    @property
    def device(self) -> torch.device:
        """The device to train on."""
        return self._device

    def train(self, task: Task) -> None:
        """Train and submit, or report to the server why not.

        Errors of the job's code end the task, never the client.

        Raises:
            Refused: If the server has refused this client for good.
        """
        if failure := self._try(task):  # the memory that the error has held is free now
            self._fail(task, failure)
        if task.end.result != "accepted":
            self.forget_changed()

    def _try(self, task: Task) -> "_Failure | None":
        """Train and submit; return a failure that is not reported yet."""
        try:
            self._train_and_submit(task)
        except TrainingStopped:
            task.end.done = True  # The server has ended the round, and may have told the group before this client.
            log.info("round %d ended before this client had trained", task.round)
        except WrongModel as error:  # the task has dealt with it
            log.error("round %d failed (%s): %s", task.round, error.reason, error)
            if error.reason in _WRONG_BASE:
                self.forget()
        except RoundOver as over:
            log.warning("round %d takes no update from this client: %s", task.round, over)
        except (SeamError, TrainError, DataError) as error:
            log.error("round %d failed (%s): %s", task.round, error.reason, error)
            if isinstance(error, CodeFailed):  # the text of what another process has raised
                return _Failure(error.reason, str(error), error.kind)
            about_data = isinstance(error, DataError)  # its text may count samples, or quote one
            return _Failure(error.reason, str(error), type(error.__cause__ or error).__name__ if about_data else "")
        except Refused:
            raise
        except Exception as error:  # the user's code may raise anything
            log.exception("round %d failed", task.round)
            return _Failure(failure_reason(error), failure_detail(error), type(error).__name__)
        return None

    def _train_and_submit(self, task: Task) -> None:
        """Train, and submit the update.

        Raises:
            Exception: Whatever ends the round: the job's code may raise anything.
        """
        self._reached = 0.0
        if not (self._config.trainer or task.job.trainer):  # a user's trainer cannot report how far it is
            task.progress(0.0)
        if self._process is not None and MODES[task.job.mode].grouped:
            text = f"this client has training.process = true, which the mode {task.job.mode} cannot do"
            raise SeamError("unknown_mode", text)
        before, compares = self._loaded, self._can_compare(task)
        if compares and self._first is None:
            self.forget()  # Only a model that was just built has the values of the seed.
        with job_code():
            loaded = self.load(task.job, lambda: task.cancelled)
        if not compares:
            self._first = None
        elif loaded is not before:
            self._first = {name: tensor.detach().clone() for name, tensor in tensors_of(loaded.model)}
        task.first_values = self._first
        where = span("train", task.command.traceparent, round=task.round, client=self._config.client_id)
        with where, job_code():
            if MODES[task.job.mode].grouped:
                self._groups.train(loaded, task)
                return
            size = _told_size(loaded, task)  # all that may be told to the server of a covered job comes before this
            cost = task.charge.cost(task.plan, size, self._config.privacy)
            known = task.ledger.note_of(task.command).samples
            training = self._training_of(loaded, task, lambda share: self._advance(task, share))
            task.load_into(loaded.model, samples=training.counted(size, known))
            with task.charge.of(cost, self._config.privacy.delta):
                own = training.train_own(task.plan, task.started.loaded.parts.not_frozen, task.load_own)
                result = self._train(training, task)
        task.submit(loaded.model, result.num_samples, result.metrics, result.seconds, own=own)
        log.info("round %d: update accepted", task.round, extra=loggable(result.metrics) | {"round": task.round})

    def _can_compare(self, task: Task) -> bool:
        """Return whether a round must start from newly built values.

        A worker of a pipeline builds no values, and a model of the site's own has others.
        """
        fresh = task.permit is not None and task.permit.starts_fresh
        return fresh and not (self._config.model or MODES[task.job.mode].staged)

    def evaluate(self, evaluation: Evaluation) -> Counts:
        """Evaluate a model on this client's held-out samples.

        The stages of a pipeline have done so already.

        Raises:
            RoundOver: If the evaluation is no longer wanted.
            Refused: If the server has refused this client for good.
            Exception: If the evaluation fails: the job's code may raise anything.
        """
        with job_code():
            if MODES.get(evaluation.job.mode, TrainingMode).staged:  # The group has done it, at the end of the round.
                return self._groups.evaluation_of(evaluation.command.model_digest)
            try:
                loaded = self.load(evaluation.job, lambda: evaluation.ended)
                evaluation.load_into(loaded.model)
                self.in_users_code = loaded.evaluator is not None
                counts = self._counts(loaded, evaluation)
                if loaded.evaluator is not None:
                    evaluation.check_frozen(loaded.model)
                if evaluation.job.personal and evaluation.load_own(loaded.model):
                    counts = self._with_own(counts, loaded, evaluation)
                return counts
            except TrainingStopped:
                raise RoundOver("deadline") from None
            except WrongModel as error:
                if error.reason in _WRONG_BASE:
                    self.forget()
                raise
            finally:
                if self.in_users_code:
                    self.forget_changed()
                self.in_users_code = False

    def _counts(self, loaded: LoadedJob, evaluation: Evaluation) -> Counts:
        if self._process is not None:
            return evaluate_remote(self._process, evaluation.job, loaded, lambda: evaluation.ended)
        samples = loaded.split.test
        return run_evaluator(loaded.evaluator, loaded.model, samples, loss=loaded.loss, device=self._device)

    def _with_own(self, counts: Counts, loaded: LoadedJob, evaluation: Evaluation) -> Counts:
        """Return counts with the figures of the loaded own model.

        If that cannot be evaluated, the figures of the round's model stay.
        """
        try:
            own = self._counts(loaded, evaluation)
        except Exception as error:  # the user's code may raise anything
            log.warning("this client's own model was not evaluated", exc_info=error)
            why = f"The client's own model was not evaluated: {failure_detail(error)}."
            return replace(counts, warnings=(*counts.warnings, why))
        return with_own(counts, own)

    def _advance(self, task: Task, share: float) -> None:
        self._reached = share
        task.progress(share)

    def _training_of(self, loaded: LoadedJob, task: Task, progress: Callable[[float], None]) -> LocalTraining:
        given = (task.command, loaded, loaded.split.train, self._device, progress, lambda: task.cancelled)
        return LocalTraining(*given) if self._process is None else RemoteTraining(*given, process=self._process)

    def _train(self, training: LocalTraining, task: Task) -> TrainResult:
        if task.corrections is not None and self._config.optimizer:
            raise SeamError(
                "no_correction", f"optimizer={self._config.optimizer} does not go with the job's corrections."
            )
        self.in_users_code = training.loaded.trainer is not None and self._process is None
        try:
            return training.train(task.plan, task.corrections)
        finally:
            self.in_users_code = False

    def _fail(self, task: Task, failure: "_Failure") -> None:
        """Report a failure.

        In covered jobs, texts of errors stay here: they may quote samples.
        """
        edited = self._offered.edited(_READ)
        detail = f"{failure.detail} ({edited})" if edited else failure.detail
        if failure.quoting and is_covered(task.command):
            detail = f"{failure.quoting}; the log of this client says more"
        task.fail(failure.reason, detail, noise=self._noise(task, failure))

    def _noise(self, task: Task, failure: "_Failure") -> nn.Module | None:
        """Return the model after a training on noise alone, or None."""
        loaded = self._loaded
        if task.charge.missing or loaded is None:
            return None
        training = self._training_of(loaded, task, lambda share: task.progress(max(share, self._reached)))
        trained = training.train_on_noise(task.plan, failure.reason, lambda: task.started.restore(loaded.model))
        return loaded.model if trained else None

    def forget(self) -> None:
        """Forget the loaded job, so that it is built anew."""
        self._loaded = None

    def forget_changed(self) -> None:
        """Forget the loaded job if its model has other tensors now.

        Code that fails half-way may leave a model of another dtype, which no later round could fill.
        """
        if self._loaded is not None and _form_of(self._loaded.model) != self._form:
            log.warning("the job's code has changed the tensors of its model: it is built anew for the next round")
            self._loaded = None

    def load(self, job: pb.JobSpec, stopped: Callable[[], bool] = lambda: False) -> LoadedJob:
        """Return the loaded job.

        It stays loaded from job to job as long as the names and their arguments stay the same.
        """
        if (edited := self._offered.edited(_READ)) != self._edited:
            self._edited = edited
            log.warning("%s", edited)
        key = pb.JobSpec()
        key.CopyFrom(job)
        for field in ("job_id", "name", "rounds"):
            key.ClearField(field)
        wanted = key.SerializeToString(deterministic=True)
        if self._loaded is None or wanted != self._key:
            self._loaded = None  # Frees the old data before the new data is loaded.
            if self._process is not None:
                self._loaded = load_remote(self._process, job, self._config, stopped)
            else:
                self._loaded = load_own(job, self._config, self._offered, self._device)
            self._key = wanted
            self._form = _form_of(self._loaded.model)
        return self._loaded


def offered_by(config: ClientConfig) -> Offered:
    """Collect the callables that jobs may name.

    These are the trusted ones, and those that the configuration itself names.

    A site with a policy offers only what is marked, or named one by one.

    Raises:
        SeamError: As collect() does.
    """
    own = named(**{part: getattr(config, part) for part in PARTS})
    offered = collect([*config.trusted, *own], root=config.data_root, download=config.download)
    return offered.marked() if config.privacy.demands or config.private else offered


def prepare(config: ClientConfig, *, trains: bool = True) -> None:
    """Set the number of torch's threads, and warm torch up.

    Otherwise torch would load parts of itself in the first round.

    Args:
        config: The configuration.
        trains: Whether this process trains, so that it needs the device.
    """
    torch.set_num_threads(config.threads or threads_for(config.clients_on_host))
    if trains:
        warm_up(pick_device(config.device))


def _told_size(loaded: LoadedJob, task: Task) -> int:
    """Return the number of samples; 0 if nobody needs to know it.

    Raises:
        TrainError: With the reason no_data, if the round is covered, and this client has no samples: then nothing
            of that can be told.
    """
    if not is_covered(task.command) or (loaded.trainer is not None and not hasattr(loaded.split.train, "__len__")):
        return 0
    size = size_of(loaded.split.train)
    if not size and loaded.trainer is None:
        raise TrainError("no_data", "This client has no samples to train on: give it some.")
    return size


def _form_of(model: nn.Module) -> object:
    """Return the names, dtypes and shapes of a model's tensors.

    None if its state dict holds something else.
    """
    try:
        return [(name, tensor.dtype, tensor.shape) for name, tensor in tensors_of(model)]
    except SeamError:
        return None
