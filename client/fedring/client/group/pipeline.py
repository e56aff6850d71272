"""Pipeline rounds: each worker of a group trains some stages of the model and keeps a copy of the newest checkpoint."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from fedring.client.config import ClientConfig
from fedring.client.group.round import job_key, parse_table, peer_options, plan_of, take_part
from fedring.client.pipeline_metrics import KINDS, PipelineMetrics
from fedring.client.task import Task
from fedring.pipeline.run import Report
from fedring.ring import RingError
from fedring.schedules.schedule import Kind
from fedring.train.batches import Inputs, fetch
from fedring.train.errors import TrainError, failure_detail, failure_reason
from fedring.train.loop import Loss, OptimizerFactory
from fedring.train.pipeline_table import Pipeline
from fedring.workers.cutting import count_layers, cut_model
from fedring.workers.pipeline_epochs import PipelineProfile, PipelineSetup, PipelineTraining
from fedring.workers.replica import Replica, synchronize
from fedring.workers.training import Watcher
from fedring.workers.usage import Usage

log = logging.getLogger(__name__)

_ORDER = (Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE)  # in the order of KINDS


@dataclass(slots=True, eq=False)
class PipelineState:
    """What a worker keeps from round to round of one job. PipelineTrainer owns it."""

    replica: Replica  # the newest checkpoint, in the host's memory
    micro_batches: int = 0  # the number that was found to be the fastest; 0 = not measured


class PipelineTrainer:
    """Trains pipeline rounds, and keeps a job's newest checkpoint from round to round.

    Args:
        config: The client's configuration.
        trusted: The modules from which the job's own cut may be imported.
        device: Where to train.
    """

    def __init__(self, config: ClientConfig, trusted: Sequence[str], device: torch.device) -> None:
        self._options = peer_options(config)
        self._trusted = trusted
        self._device = device
        self._key: tuple[object, ...] = ()
        self._state: PipelineState | None = None

    def train(
        self, task: Task, model: nn.Module, samples: Dataset[Any], *, loss: Loss, optimizer: OptimizerFactory
    ) -> None:
        """Train one round, and deliver its model if the server chooses this worker for it.

        Args:
            task: The round.
            model: The model that the job names.
            samples: All samples; all workers use the same.
            loss: The loss that the job names.
            optimizer: Makes the optimizer that the job names.

        Raises:
            TrainingStopped: If the round ended before it was trained.
            RoundOver: If the server has not accepted the update.
            SeamError: If this client does not understand the job, or the model cannot be cut.
        """
        table, plan = parse_table(Pipeline, "pipeline", task.job.pipeline), plan_of(task)
        model.cpu()  # An evaluation may have left it on the device.
        task.load_into(model)
        size = max(1, plan.batch_size // (table.interval or table.unit))
        counts = count_layers(model, table, lambda: _first_inputs(samples, size))
        # If this fails, it must fail before the others wait for this worker.
        cut_model(model, table, counts, self._trusted)
        state = self._state_for(task, model, optimizer)
        state.replica.begin_round()
        setup = PipelineSetup(
            samples,
            plan,
            table,
            loss,
            optimizer,
            self._device,
            self._trusted,
            counts,
            lambda report, in_flight: add_run(task.metrics.pipe, report, in_flight),
        )
        take_part(task, PipelinePart(state, setup), self._options, model)

    def _state_for(self, task: Task, model: nn.Module, optimizer: OptimizerFactory) -> PipelineState:
        """Return the state of the job's previous round, or a new one."""
        key = job_key(task, model)
        if self._state is None or self._key != key:
            plan = plan_of(task)
            parameters = [p for p in model.parameters() if p.requires_grad]
            self._state = PipelineState(Replica(model, optimizer(parameters, plan.lr, plan.momentum)))
            self._key = key
        return self._state


@dataclass(slots=True, eq=False)
class PipelinePart:
    """This worker's part in a pipeline round: some stages of the model."""

    state: PipelineState
    setup: PipelineSetup
    usage: Usage = field(default_factory=Usage)
    _profile: PipelineProfile = field(default_factory=PipelineProfile)
    _means: dict[str, float] = field(default_factory=dict)
    _reached: int = 0  # the step of the job that was reached, including those after the checkpoint

    @property
    def steps(self) -> int:
        """The step of the job at which the newest checkpoint was taken."""
        return self.state.replica.progress.steps

    @property
    def metrics(self) -> dict[str, float]:
        """The figures of the training, by name."""
        facts = {"workers": self.setup.table.workers, "job_steps": self.steps}
        return {**self._means, **self.usage.metrics, **self._profile.metrics, **facts}

    def enter(self, generation: int, *, workers: int) -> None:
        """Take over the newest checkpoint that any worker has."""
        source = synchronize(self.state.replica)
        log.info(
            "generation %d: %d workers continue from the checkpoint after step %d of the job, which rank %d had",
            generation,
            workers,
            self.steps,
            source,
            extra={"generation": generation, "workers": workers, "step": self.steps},
        )
        if self._reached > self.steps:
            log.warning("%d steps after the checkpoint are repeated", self._reached - self.steps)

    def train(self, watcher: Watcher) -> None:
        """Train to the end of the round; afterwards the replica holds all stages."""
        state = self.state
        training = None
        try:
            training = PipelineTraining(
                state.replica, self.setup, watcher, profile=self._profile, micro_batches=state.micro_batches
            )
            self._means = training.run() or self._means
        except RingError:
            raise
        except RuntimeError as error:  # It is of the job's own code. What it causes in the ring comes later.
            log.exception("a stage has failed")
            raise TrainError(failure_reason(error), failure_detail(error)) from error
        finally:
            if training is not None:
                state.micro_batches = training.micro_batches
                self.usage += training.usage
                self._reached = training.steps

    def digest(self) -> bytes:
        """Return BLAKE3 of the parameters of all stages, 32 bytes."""
        return self.state.replica.digest()


def add_run(metrics: PipelineMetrics, report: Report, in_flight: int) -> None:
    """Add a run of the schedule to the metrics."""
    actions = {(stage, KINDS[_ORDER.index(kind)]): spent for (stage, kind), spent in report.spent.items()}
    metrics.add_run(report.bubble, in_flight, actions)


def _first_inputs(samples: Dataset[Any], count: int) -> Inputs:
    """Return the first `count` inputs, with which the time of layers is measured."""
    (inputs, _), *_ = fetch(samples, [torch.arange(count)], torch.device("cpu"))
    return inputs
