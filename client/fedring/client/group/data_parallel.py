"""Data-parallel rounds of a group of workers.

Each worker trains the whole model on its share of each batch.
"""

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from fedring.client.config import ClientConfig
from fedring.client.group.checkpoints import JobCheckpoints, job_name
from fedring.client.group.hooks import JobHook, make_hook
from fedring.client.group.job_folders import begin_job, end_job, name_of
from fedring.client.group.round import job_key, parse_table, peer_options, plan_of, take_part
from fedring.client.ring_metrics import RingMetrics
from fedring.client.task import Task
from fedring.ddp import DGCState
from fedring.job_code import job_code
from fedring.train.batches import size_of
from fedring.train.dgc_optimizer import make_optimizer
from fedring.train.jobs.data_parallel_table import DataParallel
from fedring.train.loop import Loss, OptimizerFactory
from fedring.train.names.offered import Offered
from fedring.workers.data_parallel_epochs import DataParallelSetup, DataParallelTraining
from fedring.workers.replica import Replica, synchronize
from fedring.workers.training import Watcher
from fedring.workers.usage import Usage

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class DataParallelState:
    """A worker's state of one job between rounds.

    DataParallelTrainer owns it.
    """

    replica: Replica
    hook: JobHook
    checkpoints: JobCheckpoints | None = None  # None = the job takes none
    workers: int = 0  # in its newest group; 0 = it has not been in one


class DataParallelTrainer:
    """Trains data-parallel rounds.

    It keeps a job's optimizer and residuals from round to round.

    Args:
        config: The client's configuration.
        offered: What jobs may name here.
        device: Where to train.
    """

    def __init__(self, config: ClientConfig, offered: Offered, device: torch.device) -> None:
        self._options = peer_options(config)
        self._folder = config.state_dir / "checkpoints"
        self._offered = offered
        self._device = device
        self._key: tuple[object, ...] = ()
        self._state: DataParallelState | None = None
        self._is_over = False  # whether its job has trained its last round

    def train(
        self, task: Task, model: nn.Module, samples: Dataset[Any], *, loss: Loss, optimizer: OptimizerFactory
    ) -> None:
        """Train one round, and deliver its model if this worker is chosen.

        The server chooses the worker that delivers.

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
        part = DataParallelPart(state, setup, task.link.metrics.ring)

        def deliver() -> None:
            samples = max(1, part.usage.samples)  # 0 if this process has come only after the round's last step
            task.submit(model, samples, part.metrics, part.usage.seconds)

        take_part(task, part, self._options, deliver)
        if plan.job_round >= task.job.rounds:
            self._is_over = True
            end_job(self._folder_of(task))

    def _state_for(
        self, task: Task, model: nn.Module, optimizer: OptimizerFactory, table: DataParallel
    ) -> DataParallelState:
        """Return the state of the job's previous round, or a new one."""
        key = (*job_key(task), model)
        if self._state is None or self._key != key:
            plan = plan_of(task)
            hook = make_hook(table, plan, model.named_parameters(), self._offered)
            parameters = [p for p in model.parameters() if p.requires_grad]
            applied = hook.state.config.momentum if isinstance(hook.state, DGCState) else 0.0
            replica = Replica(
                model, make_optimizer(optimizer, parameters, plan.lr, plan.momentum, dgc_momentum=applied)
            )
            replica.shared = hook.shared
            self._warn_of_loss()
            checkpoints = None
            if table.checkpoint_every:
                folder = begin_job(self._folder, self._folder_of(task).name, adopt="step-*.safetensors")
                checkpoints = JobCheckpoints(folder, job_name(key[:3]))
            self._state, self._key, self._is_over = DataParallelState(replica, hook, checkpoints), key, False
        return self._state

    def _folder_of(self, task: Task) -> Path:
        """Return the folder of a job's checkpoints."""
        return self._folder / name_of(*job_key(task))

    def _warn_of_loss(self) -> None:
        """Warn if a job that may go on loses its state.

        This happens if it has no checkpoints, and a round of another job comes between two of its own.
        """
        if self._state is not None and self._state.checkpoints is None and not self._is_over:
            log.warning(
                "job %s takes no checkpoints: after a round of another job its optimizer and residuals begin anew",
                self._key[2],
            )


@dataclass(slots=True, eq=False)
class DataParallelPart:
    """This worker's part in a data-parallel round.

    It holds the whole model, and trains on a share of each batch.
    """

    state: DataParallelState
    setup: DataParallelSetup
    shown: RingMetrics
    usage: Usage = field(default_factory=Usage)
    _means: dict[str, float] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """The job's steps in this worker's memory or newest checkpoint."""
        state = self.state
        if state.checkpoints and state.checkpoints.steps and not state.workers:
            return state.checkpoints.steps[0]
        return state.replica.progress.steps

    @property
    def samples_found(self) -> int:
        """The number of training samples, equal on all workers."""
        with job_code():
            return size_of(self.setup.samples)

    @property
    def metrics(self) -> dict[str, float]:
        """The figures of the training, by name."""
        facts = {"workers": self.state.workers, "job_steps": self.steps}
        cost = self.state.checkpoints.metrics if self.state.checkpoints else {}
        return {**self._means, **self.usage.metrics, **cost, **facts}

    @property
    def can_deliver(self) -> bool:
        """Every worker can deliver: all of them have the whole model."""
        return True

    def enter(self, generation: int, *, workers: int) -> None:
        """Copy the most advanced worker's state, and rescale the residuals.

        The residuals are scaled to the size of the group. If no worker has as new a state in memory, those that have
        the group's checkpoint continue from it first.
        """
        state, hook, checkpoints = self.state, self.state.hook, self.state.checkpoints
        live, round_ = state.workers > 0, self.setup.plan.round
        resumed = checkpoints.resume(state.replica, hook, live=live, round_=round_) if checkpoints else None
        hook.leave()
        source = synchronize(state.replica)
        steps = state.replica.progress.steps
        if not (resumed and resumed.on_all):  # else the hook's states of all workers belong together as they are
            hook.enter(state.workers, steps)
        if checkpoints:
            checkpoints.drop_after(steps)
        log.info(
            "generation %d: %d workers continue after step %d of the job, with the state of rank %d",
            generation,
            workers,
            steps,
            source,
            extra={"generation": generation, "workers": workers, "step": steps},
        )
        if workers < state.workers:
            log.warning("the residuals of %d lost workers are lost", state.workers - workers)
        state.workers = workers

    def train(self, watcher: Watcher) -> None:
        """Train to the end of the round."""
        state, checkpoints = self.state, self.state.checkpoints
        training = DataParallelTraining(state.replica, self.setup, state.hook, watcher)
        if checkpoints:
            round_ = self.setup.plan.round
            training.keep = lambda random: checkpoints.take(state.replica, state.hook, random, round_=round_)
            training.random, checkpoints.random = checkpoints.random, None
        try:
            with self.shown.training(training, workers=state.workers):
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
