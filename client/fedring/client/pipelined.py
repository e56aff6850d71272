"""Pipeline training as a job declares it: each worker has stages of the model, and a copy of the newest checkpoint."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from fedring.client.config import ClientConfig
from fedring.client.grouped import parse_table, peer_options, plan_of, take_part
from fedring.client.pipe_metrics import KINDS, PipeMetrics
from fedring.client.task import Task
from fedring.pipeline.worker import Report
from fedring.ring import RingError
from fedring.schedules.schedule import Kind
from fedring.train.batches import fetch
from fedring.train.errors import TrainError, told, verdict
from fedring.train.loop import Loss, OptimizerFactory
from fedring.train.pipelined import Pipeline
from fedring.workers.cutting import count_layers, cut_model
from fedring.workers.flow import Course, PipelineTraining, Profile
from fedring.workers.replica import Replica, synchronize
from fedring.workers.usage import Usage
from fedring.workers.watcher import Watcher

log = logging.getLogger(__name__)

_ORDER = (Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE)  # as in KINDS


@dataclass(slots=True, eq=False)
class Standing:
    """What a worker keeps from round to round of one job."""

    replica: Replica  # in the host's memory
    micro_batches: int = 0  # that were found to be the fastest; 0 = nobody has looked


class PipelineTrainer:
    """Keeps a job's newest checkpoint from round to round."""

    def __init__(self, config: ClientConfig, trusted: Sequence[str], device: torch.device) -> None:
        self._options = peer_options(config)
        self._trusted = trusted
        self._device = device
        self._key: tuple[Any, ...] = ()
        self._standing: Standing | None = None

    def train(
        self, task: Task, model: nn.Module, samples: Dataset[Any], *, loss: Loss, optimizer: OptimizerFactory
    ) -> None:
        """The round is over, and was delivered if that fell to this worker; TrainingStopped if it ended too early."""
        table, plan = parse_table(Pipeline, "pipeline", task.job.pipeline), plan_of(task)
        model.cpu()  # an evaluation may have left it on the device
        task.load_into(model)
        size = max(1, plan.batch_size // (table.interval or table.unit))
        counts = count_layers(model, table, lambda: _first_inputs(samples, size))
        cut_model(model, table, counts, self._trusted)  # or nobody is to wait for this worker
        standing = self._standing_for(task, model, optimizer)
        standing.replica.begin_round()
        course = Course(
            samples,
            plan,
            table,
            loss,
            optimizer,
            self._device,
            self._trusted,
            counts,
            lambda report, in_flight: show(task.metrics.pipe, report, in_flight),
        )
        take_part(task, Staged(standing, course), self._options, model)

    def _standing_for(self, task: Task, model: nn.Module, optimizer: OptimizerFactory) -> Standing:
        """That of the job's round before, or a new one."""
        plan, command = plan_of(task), task.command
        key = (command.run_id, command.epoch, command.job.job_id, model)
        if self._standing is None or self._key != key:
            parameters = [p for p in model.parameters() if p.requires_grad]
            self._standing = Standing(Replica(model, optimizer(parameters, plan.lr, plan.momentum)))
            self._key = key
        return self._standing


@dataclass(slots=True, eq=False)
class Staged:
    """This worker's part in a pipeline round: some stages of the model."""

    standing: Standing
    course: Course
    usage: Usage = field(default_factory=Usage)
    _profile: Profile = field(default_factory=Profile)
    _means: dict[str, float] = field(default_factory=dict)
    _reached: int = 0  # steps of the job that were taken, checkpoint or not

    @property
    def steps(self) -> int:
        """Steps of the job up to the newest checkpoint."""
        return self.standing.replica.progress.steps

    @property
    def metrics(self) -> dict[str, float]:
        """What the training says of itself."""
        facts = {"workers": self.course.table.workers, "job_steps": self.steps}
        return {**self._means, **self.usage.metrics, **self._profile.metrics, **facts}

    def enter(self, generation: int, *, workers: int) -> None:
        """This worker's checkpoint is the newest that one of the workers has."""
        source = synchronize(self.standing.replica)
        log.info(
            "generation %d: %d workers, from the checkpoint after step %d of the job, which rank %d had",
            generation,
            workers,
            self.steps,
            source,
            extra={"generation": generation, "workers": workers, "step": self.steps},
        )
        if self._reached > self.steps:
            log.warning("%d steps after the checkpoint are taken again", self._reached - self.steps)

    def train(self, watcher: Watcher) -> None:
        """The round is trained to its end, and the replica holds all stages."""
        standing = self.standing
        training = None
        try:
            training = PipelineTraining(
                standing.replica, self.course, watcher, profile=self._profile, micro_batches=standing.micro_batches
            )
            self._means = training.run() or self._means
        except RingError:
            raise
        except RuntimeError as error:  # of the job's own code: what it did to the ring comes after it
            log.exception("a stage cannot go on")
            raise TrainError(verdict(error), told(error)) from error
        finally:
            if training is not None:
                standing.micro_batches = training.micro_batches
                self.usage += training.usage
                self._reached = training.steps

    def digest(self) -> bytes:
        """BLAKE3 of the parameters of all stages, 32 bytes."""
        return self.standing.replica.digest()


def show(metrics: PipeMetrics, report: Report, in_flight: int) -> None:
    """The metrics have what a run of the schedule took."""
    actions = {(stage, KINDS[_ORDER.index(kind)]): spent for (stage, kind), spent in report.spent.items()}
    metrics.ran(report.bubble, in_flight, actions)


def _first_inputs(samples: Dataset[Any], count: int) -> Tensor:
    """A micro-batch to measure layers with."""
    (inputs, _), *_ = fetch(samples, [torch.arange(count)], torch.device("cpu"))
    return inputs
