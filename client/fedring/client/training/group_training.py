"""A client's training in the groups of workers of its jobs."""

from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch

from fedring.client.config import ClientConfig
from fedring.client.task import Task
from fedring.client.training.job_loading import model_of
from fedring.client.training.local_training import LoadedJob
from fedring.train.evaluation import Counts
from fedring.train.jobs.modes import MODES
from fedring.train.names.offered import Offered
from fedring.train.names.seam import build_model

if TYPE_CHECKING:
    from fedring.client.group.data_parallel import DataParallelTrainer
    from fedring.client.group.pipeline import PipelineTrainer


class GroupTraining:
    """Trains a client in groups, each with the trainer of its mode.

    Args:
        config: The client's configuration.
        offered: What jobs may name here.
        device: Where to train.
    """

    def __init__(self, config: ClientConfig, offered: Offered, device: torch.device) -> None:
        self._config, self._offered, self._device = config, offered, device

    def train(self, loaded: LoadedJob, task: Task) -> None:
        """Train a round with the other workers of its group."""
        model, samples, loss, optimizer = loaded.model, loaded.split.train, loaded.loss, loaded.optimizer
        if MODES[task.job.mode].staged:
            whole = partial(build_model, *model_of(task.job, self._config), self._offered)
            held_out = loaded.split.test
            self._pipeline.train(task, model, samples, held_out, loss=loss, optimizer=optimizer, whole=whole)
        else:
            self._data_parallel.train(task, model, samples, loss=loss, optimizer=optimizer)

    def evaluation_of(self, digest: str) -> Counts:
        """See PipelineTrainer.evaluation_of."""
        return self._pipeline.evaluation_of(digest)

    @cached_property
    def _data_parallel(self) -> "DataParallelTrainer":
        from fedring.client.group.data_parallel import DataParallelTrainer  # imports torch.distributed's collectives

        return DataParallelTrainer(self._config, self._offered, self._device)

    @cached_property
    def _pipeline(self) -> "PipelineTrainer":
        from fedring.client.group.pipeline import PipelineTrainer  # as above

        return PipelineTrainer(self._config, self._offered, self._device)
