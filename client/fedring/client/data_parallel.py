"""Data-parallel training as a job declares it: the same model, data and loss as ever, in a group of workers."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn
from torch.utils.data import Dataset

from fedring.client.config import ClientConfig
from fedring.client.hooks import Compressed, make_hook
from fedring.client.task import Task
from fedring.client.worker import Standing, Worker
from fedring.ring import RingOptions, total_traffic
from fedring.train.errors import SeamError, TrainingStopped
from fedring.train.group import Course
from fedring.train.loop import Loss, OptimizerFactory
from fedring.train.parallel import DataParallel
from fedring.train.plan import Plan
from fedring.train.replica import Replica

log = logging.getLogger(__name__)


class DataParallelTrainer:
    """Keeps a job's optimizer, and what compression owes, from round to round."""

    def __init__(self, config: ClientConfig, trusted: Sequence[str], device: torch.device) -> None:
        self._options = RingOptions(listen=config.peer_listen, advertise=config.peer_address)
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
        rounds = task.job.rounds
        course = Course(
            samples,
            plan,
            table,
            loss,
            self._device,
            total_epochs=rounds * plan.epochs,
            first_epoch=(plan.job_round - 1) * plan.epochs,
        )
        task.metrics.ring.read(total_traffic)
        with task.rendezvous() as rendezvous:
            worker = Worker(rendezvous, standing, course, self._options, lambda: _look(task), task.progress)
            worker.ring = task.metrics.ring
            if worker.run():
                task.submit(model, worker.usage.samples, worker.metrics, worker.usage.seconds)
                worker.stay()
            task.stand_aside(worker.usage.seconds)
        log.info("round %d is over", task.round, extra={"round": task.round, **worker.metrics})

    def _standing_for(self, task: Task, model: nn.Module, optimizer: OptimizerFactory, table: DataParallel) -> Standing:
        """That of the job's round before, or a new one."""
        command = task.command
        key = (command.run_id, command.job.job_id, model)
        if self._standing is None or self._key != key:
            plan = plan_of(task)
            hook = make_hook(table, plan, model.named_parameters(), self._trusted)
            compressed = isinstance(hook, Compressed)
            # Compression corrects momentum before it sends: an optimizer's own would act once more.
            momentum = 0.0 if compressed else plan.momentum
            parameters = [p for p in model.parameters() if p.requires_grad]
            replica = Replica(model, optimizer(parameters, plan.lr, momentum))
            if isinstance(hook, Compressed):
                replica.shared = hook.state.shared()
            self._standing, self._key = Standing(replica, hook), key
        return self._standing


def table_of(task: Task) -> DataParallel:
    """The job's table; SeamError if this client does not understand it."""
    try:
        return DataParallel.model_validate_json(task.job.data_parallel or "{}")
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise SeamError("bad_job", f"data_parallel.{where}: {first['msg']}: update this client.") from error


def plan_of(task: Task) -> Plan:
    """How the round is to be trained; its seed is the same for all workers, which draw from one order."""
    c = task.command
    return Plan(
        c.epochs,
        c.batch_size,
        c.lr,
        c.momentum,
        subset_size=c.subset_size,
        seed=c.seed,
        round=c.round,
        job_round=c.job_round,
    )


def _look(task: Task) -> None:
    if task.cancelled:
        raise TrainingStopped
