"""Pipeline rounds of a group of workers.

Each worker trains some stages of the model, and holds nothing of the others.
"""

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from fedring.client.config import ClientConfig
from fedring.client.group.job_folders import begin_job, end_job, name_of
from fedring.client.group.round import job_key, parse_table, peer_options, plan_of, take_part
from fedring.client.group.whole_model import WholeModel
from fedring.client.pipeline_metrics import KINDS, PipelineMetrics
from fedring.client.task import Task
from fedring.daemon.memory import return_large_blocks
from fedring.job_code import job_code
from fedring.pipeline.run import Report
from fedring.ring import RingError
from fedring.schedules.schedule import Kind
from fedring.train.batches import Inputs, fetch
from fedring.train.errors import TrainError, failure_detail, failure_reason
from fedring.train.evaluation import Counts
from fedring.train.jobs.pipeline_table import Pipeline
from fedring.train.loop import Loss, OptimizerFactory
from fedring.train.names.offered import Offered
from fedring.train.tensors.state import schema_of, tensors_of
from fedring.workers.assembly import AssembledModel
from fedring.workers.cutting import count_layers, cut_model
from fedring.workers.pipeline_epochs import PipelineSetup, PipelineTraining, layout_of
from fedring.workers.pipeline_profile import PipelineProfile
from fedring.workers.stage_checkpoints import Checkpoint, StageCheckpoints, recover
from fedring.workers.training import Watcher
from fedring.workers.usage import Usage

log = logging.getLogger(__name__)

_MOST_STATE = 16  # times the model's size that a stage with its optimizer's state may have
_MOST_HEADER = 64 << 20  # bytes
_ORDER = (Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE)  # in the order of KINDS


@dataclass(slots=True, eq=False)
class PipelineState:
    """A worker's state of one job between rounds.

    PipelineTrainer owns it.
    """

    checkpoints: StageCheckpoints
    counts: list[int]  # of layers, for a cut by parameters or by time
    evaluations: dict[str, Counts] = field(default_factory=dict)  # of the newest model, by its name
    settings: str = ""  # with which the fastest number of micro-batches is measured
    micro_batches: int = 0  # that number; 0 = not measured


class PipelineTrainer:
    """Trains pipeline rounds.

    It keeps a job's newest checkpoint from round to round, in the client's state folder.

    Args:
        config: The client's configuration.
        offered: What jobs may name here.
        device: Where to train.
    """

    def __init__(self, config: ClientConfig, offered: Offered, device: torch.device) -> None:
        return_large_blocks()
        self._options = peer_options(config)
        self._client_id, self._folder = config.client_id, config.state_dir / "checkpoints"
        self._offered = offered
        self._device = device
        self._key: tuple[object, ...] = ()
        self._state: PipelineState | None = None

    def train(
        self,
        task: Task,
        model: nn.Module,
        samples: Dataset[Any],
        held_out: Dataset[Any],
        *,
        loss: Loss,
        optimizer: OptimizerFactory,
        whole: Callable[[], nn.Module],
    ) -> None:
        """Train one round, and deliver its model if this worker is chosen.

        The server chooses the worker that delivers.

        Args:
            task: The round.
            model: The model that the job names, without values.
            samples: All samples; all workers use the same.
            held_out: All samples that the trained model is evaluated on.
            loss: The loss that the job names.
            optimizer: Makes the optimizer that the job names.
            whole: Builds the same model with values, to measure its layers.

        Raises:
            TrainingStopped: If the round ended before it was trained.
            RoundOver: If the server has not accepted the update.
            SeamError: If this client does not understand the job, or the model cannot be cut.
        """
        table, plan = parse_table(Pipeline, "pipeline", task.job.pipeline), plan_of(task)
        whole_model = WholeModel(task, self._client_id)
        whole_model.check(model)
        state = self._state_for(task, model, samples, whole)
        # If this fails, it must fail before the others wait for this worker.
        cut_model(model, table, state.counts, self._offered)
        setup = PipelineSetup(
            model=model,
            base_digest=task.command.model_digest,
            fetch=whole_model.fetch,
            checkpoints=state.checkpoints,
            update_file=task.end.update_file,
            samples=samples,
            plan=plan,
            table=table,
            loss=loss,
            optimizer=optimizer,
            device=self._device,
            offered=self._offered,
            held_out=None if task.command.without_evaluation else held_out,
            counts=state.counts,
            on_run=lambda report, in_flight: add_run(task.link.metrics.pipe, report, in_flight),
        )
        part = PipelinePart(state, setup)

        def deliver() -> None:
            if part.update is None:
                raise RuntimeError("the server has chosen a worker that does not hold the update")
            whole_model.submit(part.update, part.samples, part.metrics, part.usage.seconds)

        try:
            take_part(task, part, self._options, deliver)
            if plan.job_round >= task.job.rounds:
                end_job(self._folder / self._name_of(task, model))
        finally:
            task.end.update_file.unlink(missing_ok=True)  # if another worker has delivered the update

    def evaluation_of(self, digest: str) -> Counts:
        """Return this worker's counts from the evaluation of a model.

        They are zeros if other workers have evaluated it, or nobody has.

        Args:
            digest: The name of the model.
        """
        return self._state.evaluations.get(digest, Counts()) if self._state else Counts()

    def _state_for(
        self, task: Task, model: nn.Module, samples: Dataset[Any], whole: Callable[[], nn.Module]
    ) -> PipelineState:
        """Return the state of the job's previous round, or a new one."""
        key = (*job_key(task), model)
        if self._state is None or self._key != key:
            table, plan = parse_table(Pipeline, "pipeline", task.job.pipeline), plan_of(task)
            size = max(1, plan.batch_size // (table.interval or table.unit))
            # Layers are measured with values, and the whole model is in memory meanwhile.
            measured = whole() if table.cut == "time" else model
            counts = count_layers(measured, table, lambda: _first_inputs(samples, size))
            folder = self._name_of(task, model)
            begin_job(self._folder, folder)
            most = _MOST_STATE * sum(t.numel() * t.element_size() for _, t in tensors_of(model)) + _MOST_HEADER
            kept = StageCheckpoints(self._folder, folder, max_file_bytes=most)
            settings = f"{plan.batch_size} {table.model_dump_json()}"
            self._state = PipelineState(kept, counts, settings=settings, micro_batches=kept.fastest(settings))
            self._key = key
        return self._state

    def _name_of(self, task: Task, model: nn.Module) -> str:
        """Return the name of the folder of a job's checkpoints."""
        return name_of(*job_key(task), schema_of(model).hash)


@dataclass(slots=True, eq=False)
class PipelinePart:
    """This worker's part in a pipeline round: some stages of the model."""

    state: PipelineState
    setup: PipelineSetup
    usage: Usage = field(default_factory=Usage)
    update: AssembledModel | None = None  # at the end of the round, if this worker can deliver it
    samples: int = 0  # that the model was trained on in the round
    _profile: PipelineProfile = field(default_factory=PipelineProfile)
    _means: dict[str, float] = field(default_factory=dict)
    _checkpoint: Checkpoint | None = None  # from which the group continues; None = the published model
    _reached: int = 0  # the step of the job that was reached, including those after the checkpoint
    _digest: str = ""

    @property
    def steps(self) -> int:
        """The job's step of the newest checkpoint complete on all workers."""
        return self.state.checkpoints.steps

    @property
    def samples_found(self) -> int:
        """Zero: the workers compare their samples themselves."""
        return 0

    @property
    def metrics(self) -> dict[str, float]:
        """The figures of the training, by name."""
        facts = {"workers": self.setup.table.workers, "job_steps": self.steps}
        return {**self._means, **self.usage.metrics, **self._profile.metrics, **facts}

    @property
    def can_deliver(self) -> bool:
        """Whether this worker holds the whole update."""
        return self.update is not None

    def enter(self, generation: int, *, workers: int) -> None:
        """Agree on the newest complete checkpoint, and fetch its missing files.

        Only the files that this worker should have are fetched.
        """
        self._checkpoint = recover(self.state.checkpoints, layout_of(self.setup.table))
        log.info(
            "generation %d: %d workers continue from %s",
            generation,
            workers,
            f"the checkpoint after step {self.steps} of the job" if self._checkpoint is not None else "the first model",
            extra={"generation": generation, "workers": workers, "step": self.steps},
        )
        if self._reached > self.steps:
            log.warning("%d steps after the checkpoint are repeated", self._reached - self.steps)

    def train(self, watcher: Watcher) -> None:
        """Train to the end of the round.

        Afterwards some workers hold the whole model as a file.
        """
        training = None
        self.update = None
        try:
            training = PipelineTraining(
                self.setup,
                self._checkpoint,
                watcher,
                profile=self._profile,
                micro_batches=self.state.micro_batches,
            )
            with job_code():  # so that it is a RuntimeError here
                self._means = training.run() or self._means
            self.state.evaluations = {training.model_digest: training.evaluation}
            self.update, self._digest, self.samples = training.update, training.model_digest, training.samples
        except RingError:
            raise
        except TrainError as error:
            if error.reason == "bad_checkpoint":  # The next round takes this worker's stages from its neighbours.
                self.state.checkpoints.keep(None, ())
            raise
        except RuntimeError as error:  # It is of the job's own code. What it causes in the ring comes later.
            log.exception("a stage has failed")
            raise TrainError(failure_reason(error), failure_detail(error)) from error
        finally:
            if training is not None:
                known = self.state.micro_batches
                if self.setup.table.micro_batches == "auto" and training.micro_batches not in (0, known):
                    self.state.micro_batches = training.micro_batches
                    self.state.checkpoints.note_fastest(training.micro_batches, self.state.settings)
                self.usage += training.usage
                self._reached = training.steps
                training = None
                gc.collect()  # The stages refer to the training and it to them; their memory must not wait.

    def digest(self) -> bytes:
        """Return the digest of the trained model, 32 bytes."""
        return bytes.fromhex(self._digest.rpartition("-")[2])


def add_run(metrics: PipelineMetrics, report: Report, in_flight: int) -> None:
    """Add a run of the schedule to the metrics."""
    actions = {(stage, KINDS[_ORDER.index(kind)]): spent for (stage, kind), spent in report.spent.items()}
    metrics.add_run(report.bubble, in_flight, actions)


def _first_inputs(samples: Dataset[Any], count: int) -> Inputs:
    """Return the first `count` inputs, to measure the layers' time."""
    (inputs, _), *_ = fetch(samples, [torch.arange(count)], torch.device("cpu"))
    return inputs
