"""Data-parallel training as a job declares it: the same model, data and loss as ever, in a group of workers."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from fedring.client.config import ClientConfig
from fedring.client.grouped import parse_table, peer_options, plan_of, take_part
from fedring.client.hooks import Compressed, make_hook
from fedring.client.ring_metrics import RingMetrics
from fedring.client.task import Task
from fedring.train.loop import Loss, OptimizerFactory
from fedring.train.parallel import DataParallel
from fedring.workers.group import Course, GroupTraining
from fedring.workers.replica import Replica, synchronize
from fedring.workers.usage import Hook, Usage
from fedring.workers.watcher import Watcher

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Standing:
    """What a worker keeps from round to round of one job."""

    replica: Replica
    hook: Hook
    workers: int = 0  # in its newest group; 0 = it was in none yet


class DataParallelTrainer:
    """Keeps a job's optimizer, and what compression owes, from round to round."""

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
        table, plan = table_of(task), plan_of(task)
        task.load_into(model)
        standing = self._standing_for(task, model, optimizer, table)
        standing.replica.begin_round()
        course = Course(
            samples,
            plan,
            table,
            loss,
            self._device,
            total_epochs=task.job.rounds * plan.epochs,
            first_epoch=(plan.job_round - 1) * plan.epochs,
        )
        take_part(task, Replicated(standing, course, task.metrics.ring), self._options, model)

    def _standing_for(self, task: Task, model: nn.Module, optimizer: OptimizerFactory, table: DataParallel) -> Standing:
        """That of the job's round before, or a new one."""
        command = task.command
        key = (command.run_id, command.epoch, command.job.job_id, model)
        if self._standing is None or self._key != key:
            plan = plan_of(task)
            hook = make_hook(table, plan, model.named_parameters(), self._trusted)
            # DGC corrects momentum before it sends: an optimizer's own would act once more.
            momentum = 0.0 if table.hook == "dgc" else plan.momentum
            parameters = [p for p in model.parameters() if p.requires_grad]
            replica = Replica(model, optimizer(parameters, plan.lr, momentum))
            if isinstance(hook, Compressed):
                replica.shared = hook.shared
            self._standing, self._key = Standing(replica, hook), key
        return self._standing


@dataclass(slots=True, eq=False)
class Replicated:
    """This worker's part in a data-parallel round: the whole model, and a share of each batch."""

    standing: Standing
    course: Course
    shown: RingMetrics
    usage: Usage = field(default_factory=Usage)
    _means: dict[str, float] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """Steps of the job that this worker has taken."""
        return self.standing.replica.progress.steps

    @property
    def metrics(self) -> dict[str, float]:
        """What the training says of itself."""
        return {**self._means, **self.usage.metrics, "workers": self.standing.workers, "job_steps": self.steps}

    def enter(self, generation: int, *, workers: int) -> None:
        """This worker is where the one with most steps was, and what it owes is scaled to the group's size."""
        standing, hook = self.standing, self.standing.hook
        if isinstance(hook, Compressed):
            hook.leave()
        source = synchronize(standing.replica)
        if isinstance(hook, Compressed):
            hook.enter(standing.workers, self.steps)
        log.info(
            "generation %d: %d workers, from step %d of the job, which rank %d had",
            generation,
            workers,
            self.steps,
            source,
            extra={"generation": generation, "workers": workers, "step": self.steps},
        )
        if workers < standing.workers:
            log.warning("what %d lost workers had not sent is lost", standing.workers - workers)
        standing.workers = workers

    def train(self, watcher: Watcher) -> None:
        """The round is trained to its end."""
        training = GroupTraining(self.standing.replica, self.course, self.standing.hook, watcher)
        try:
            with self.shown.training(training, workers=self.standing.workers):
                self._means = training.run() or self._means
        finally:
            self.usage += training.usage

    def digest(self) -> bytes:
        """BLAKE3 of the parameters, 32 bytes."""
        return self.standing.replica.digest()


def table_of(task: Task) -> DataParallel:
    """The job's table; SeamError if this client does not understand it."""
    return parse_table(DataParallel, "data_parallel", task.job.data_parallel)
