"""Data-parallel rounds: each worker of a group trains the whole model on its share of each batch."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from fedring.client.config import ClientConfig
from fedring.client.group.round import job_key, parse_table, peer_options, plan_of, take_part
from fedring.client.hooks import JobHook, make_hook
from fedring.client.ring_metrics import RingMetrics
from fedring.client.task import Task
from fedring.train.data_parallel_table import DataParallel
from fedring.train.loop import Loss, OptimizerFactory
from fedring.workers.data_parallel_epochs import DataParallelSetup, DataParallelTraining
from fedring.workers.replica import Replica, synchronize
from fedring.workers.training import Watcher
from fedring.workers.usage import Usage

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class DataParallelState:
    """What a worker keeps from round to round of one job. DataParallelTrainer owns it."""

    replica: Replica
    hook: JobHook
    workers: int = 0  # in its newest group; 0 = it has not been in one


class DataParallelTrainer:
    """Trains data-parallel rounds, and keeps a job's optimizer and residuals from round to round.

    Args:
        config: The client's configuration.
        trusted: The modules from which a job's hook may be imported.
        device: Where to train.
    """

    def __init__(self, config: ClientConfig, trusted: Sequence[str], device: torch.device) -> None:
        self._options = peer_options(config)
        self._trusted = trusted
        self._device = device
        self._key: tuple[object, ...] = ()
        self._state: DataParallelState | None = None

    def train(
        self, task: Task, model: nn.Module, samples: Dataset[Any], *, loss: Loss, optimizer: OptimizerFactory
    ) -> None:
        """Train one round, and deliver its model if the server chooses this worker for it.

        Args:
            task: The round.
            model: The model that the job names.
            samples: All samples; each worker takes its share.
            loss: The loss that the job names.
            optimizer: Makes the optimizer that the job names.

        Raises:
            TrainingStopped: If the round ended before it was trained.
            RoundOver: If the server has not accepted the update.
            SeamError: If this client does not understand the job.
        """
        table, plan = table_of(task), plan_of(task)
        task.load_into(model)
        state = self._state_for(task, model, optimizer, table)
        state.replica.begin_round()
        setup = DataParallelSetup(
            samples,
            plan,
            table,
            loss,
            self._device,
            total_epochs=task.job.rounds * plan.epochs,
            first_epoch=(plan.job_round - 1) * plan.epochs,
        )
        part = DataParallelPart(state, setup, task.metrics.ring)

        def deliver() -> None:
            task.submit(model, part.usage.samples, part.metrics, part.usage.seconds)

        take_part(task, part, self._options, deliver)

    def _state_for(
        self, task: Task, model: nn.Module, optimizer: OptimizerFactory, table: DataParallel
    ) -> DataParallelState:
        """Return the state of the job's previous round, or a new one."""
        key = (*job_key(task), model)
        if self._state is None or self._key != key:
            plan = plan_of(task)
            hook = make_hook(table, plan, model.named_parameters(), self._trusted)
            # DGC applies momentum before it compresses, so the optimizer must not apply it again.
            momentum = 0.0 if table.hook_name == "dgc" else plan.momentum
            parameters = [p for p in model.parameters() if p.requires_grad]
            replica = Replica(model, optimizer(parameters, plan.lr, momentum))
            replica.shared = hook.shared
            self._state, self._key = DataParallelState(replica, hook), key
        return self._state


@dataclass(slots=True, eq=False)
class DataParallelPart:
    """This worker's part in a data-parallel round: the whole model, and a share of each batch."""

    state: DataParallelState
    setup: DataParallelSetup
    shown: RingMetrics
    usage: Usage = field(default_factory=Usage)
    _means: dict[str, float] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """The steps of the job that this worker has taken."""
        return self.state.replica.progress.steps

    @property
    def metrics(self) -> dict[str, float]:
        """The figures of the training, by name."""
        return {**self._means, **self.usage.metrics, "workers": self.state.workers, "job_steps": self.steps}

    @property
    def can_deliver(self) -> bool:
        """Every worker can deliver: all of them have the whole model."""
        return True

    def enter(self, generation: int, *, workers: int) -> None:
        """Take over the state of the worker with the most steps, and scale the residuals to the size of the group."""
        state, hook = self.state, self.state.hook
        hook.leave()
        source = synchronize(state.replica)
        hook.enter(state.workers, self.steps)
        log.info(
            "generation %d: %d workers continue after step %d of the job, with the state of rank %d",
            generation,
            workers,
            self.steps,
            source,
            extra={"generation": generation, "workers": workers, "step": self.steps},
        )
        if workers < state.workers:
            log.warning("the residuals of %d lost workers are lost", state.workers - workers)
        state.workers = workers

    def train(self, watcher: Watcher) -> None:
        """Train to the end of the round."""
        training = DataParallelTraining(self.state.replica, self.setup, self.state.hook, watcher)
        try:
            with self.shown.training(training, workers=self.state.workers):
                self._means = training.run() or self._means
        finally:
            self.usage += training.usage

    def digest(self) -> bytes:
        """Return BLAKE3 of the parameters, 32 bytes."""
        return self.state.replica.digest()


def table_of(task: Task) -> DataParallel:
    """Return the job's table `data_parallel`.

    Raises:
        SeamError: If this client does not understand it.
    """
    return parse_table(DataParallel, "data_parallel", task.job.data_parallel)
