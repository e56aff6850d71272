"""Trains a loaded job on the samples of one client."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from fedring.client.policy.promises import sample_dp_of
from fedring.client.training.personal import personal_of, train_own
from fedring.codec.schema import Schema
from fedring.data import Split
from fedring.job_code import job_code
from fedring.train.batches import size_of
from fedring.train.errors import SeamError, TrainingStopped
from fedring.train.evaluation import Evaluator
from fedring.train.jobs.sample_privacy_table import SamplePrivacy
from fedring.train.loop import Loss, OptimizerFactory, train
from fedring.train.plan import Plan, TrainResult
from fedring.train.private_check import check_private_training
from fedring.train.private_loop import UNFIT, train_privately
from fedring.train.user_trainer import Trainer, run_trainer
from fedring.v1 import federation_pb2 as pb

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class LoadedJob:
    """Everything that a job names, loaded."""

    model: nn.Module
    split: Split
    loss: Loss
    optimizer: OptimizerFactory
    trainer: Trainer | None  # None = the built-in loop
    evaluator: Evaluator | None  # None = the built-in evaluation
    divided: bool = False  # whether the split has this client's samples already


class Loop:
    """The loop of a job that does not protect single samples."""

    noisy: ClassVar[bool] = False
    """Whether it can train with noise alone, in the place of a training that has failed."""

    def check(self, loaded: LoadedJob, samples: Dataset[Any], device: torch.device) -> None:
        """Check that a job can be trained here.

        This comes before the server's values are loaded, and is told to the server.

        Args:
            loaded: The job.
            samples: The samples of a client; if there are none, the training says so.
            device: Where to train.

        Raises:
            SeamError: If it cannot, for a reason that does not depend on what the samples say.
            TrainError: If the first sample is not what a data set must hold.
        """

    def drawn(self, size: int, subset_size: int) -> int:
        """Return the most samples of a client that a round draws.

        Args:
            size: The number of its samples.
            subset_size: The same key of the command.
        """
        return min(size, subset_size or size)

    def train(
        self,
        loaded: LoadedJob,
        samples: Dataset[Any],
        plan: Plan,
        *,
        device: torch.device,
        progress: Callable[[float], None] = lambda share: None,
        stopped: Callable[[], bool] = lambda: False,
        corrections: Mapping[str, Tensor] | None = None,
        on_nothing: bool = False,
    ) -> TrainResult:
        """Train the loaded model in place on one client's samples.

        This uses the built-in loop or the user's trainer.

        Args:
            loaded: The job; its model holds the values that the round starts from.
            samples: The samples of the client.
            plan: How the job wants the model trained.
            device: Where to train.
            progress: As for `fedring.train.loop.train`; a user's trainer cannot report how far it is.
            stopped: As for `fedring.train.loop.train`; a user's trainer does not ask.
            corrections: As for `fedring.train.loop.train`; None = the gradients are not corrected.
            on_nothing: Whether to train with the noise alone, if the loop is noisy.

        Raises:
            TrainingStopped: If `stopped` returned True.
            TrainError: If there are no samples, the training diverged, or the user's trainer reports nonsense.
            SeamError: If a user's trainer would have to correct the gradients, or something does not fit the loop.
        """
        if on_nothing:
            raise SeamError(UNFIT, "A loop without noise does not train on nothing.")
        if loaded.trainer is None:
            return train(
                loaded.model,
                samples,
                plan,
                loss=loaded.loss,
                optimizer_factory=loaded.optimizer,
                device=device,
                progress=progress,
                stopped=stopped,
                corrections=corrections or {},
            )
        if corrections is not None:
            raise SeamError("no_correction", "A trainer does not correct its gradients, as the job asks.")
        return run_trainer(loaded.trainer, loaded.model, samples, plan, device=device)


@dataclass(frozen=True, slots=True)
class PrivateLoop(Loop):
    """The loop of a job with [sample_dp], which is DP-SGD."""

    noisy: ClassVar[bool] = True

    privacy: SamplePrivacy

    def check(self, loaded: LoadedJob, samples: Dataset[Any], device: torch.device) -> None:
        """See Loop."""
        if loaded.trainer is not None:
            raise SeamError(UNFIT, "A trainer does not go with the job's [sample_dp].")
        if size_of(samples):
            check_private_training(loaded.model, samples, loss=loaded.loss, device=device)

    def drawn(self, size: int, subset_size: int) -> int:
        """See Loop."""
        return size

    def train(
        self,
        loaded: LoadedJob,
        samples: Dataset[Any],
        plan: Plan,
        *,
        device: torch.device,
        progress: Callable[[float], None] = lambda share: None,
        stopped: Callable[[], bool] = lambda: False,
        corrections: Mapping[str, Tensor] | None = None,
        on_nothing: bool = False,
    ) -> TrainResult:
        """See Loop."""
        if corrections is not None:
            raise SeamError(UNFIT, "Corrections of gradients do not go with the job's [sample_dp].")
        return train_privately(
            loaded.model,
            samples,
            plan,
            self.privacy,
            loss=loaded.loss,
            optimizer_factory=loaded.optimizer,
            device=device,
            progress=progress,
            stopped=stopped,
            on_nothing=on_nothing,
        )


def loop_of(job: pb.JobSpec) -> Loop:
    """Return the loop that trains a job's models."""
    privacy = sample_dp_of(job)
    return Loop() if privacy is None else PrivateLoop(privacy)


@dataclass(frozen=True, slots=True, eq=False)
class LocalTraining:
    """The training of one client in one round.

    It does as the keys of the job say. fl-client and the simulation run this.
    """

    command: pb.TrainCmd
    loaded: LoadedJob  # its model holds the values that the round starts from
    samples: Dataset[Any]  # of the client
    device: torch.device
    progress: Callable[[float], None] = lambda share: None  # as for `Loop.train`
    stopped: Callable[[], bool] = lambda: False  # as for `Loop.train`

    def counted(self, size: int, known: int) -> int:
        """Return for how many samples the client counts, also if it fails.

        Args:
            size: The number of its samples.
            known: How many its last update counted for, if a user's trainer decides that; 0 = nobody knows.
        """
        drawn = loop_of(self.command.job).drawn(size, self.command.subset_size)
        return known or drawn if self.loaded.trainer is not None else drawn

    def train_own(
        self, plan: Plan, schema: Schema, start: Callable[[], Mapping[str, Tensor] | None]
    ) -> dict[str, Tensor] | None:
        """Train the client's own model, before the round's.

        Afterwards the loaded model has the round's values again.

        Args:
            plan: How the job wants the round's model trained.
            schema: The tensors that are the client's own.
            start: Returns those after the client's last round; None = there was none.

        Returns:
            The tensors; None if the job asks for no own models, or the training failed.

        Raises:
            TrainingStopped: If `stopped` returned True.
            SeamError: If a user's trainer would have to do this.
        """
        if not self._own_share:
            return None
        if self.loaded.trainer is not None:
            raise SeamError(
                "no_personal", "A trainer does not train a client's own model, as the job's [personal] asks."
            )
        return self._train_own(plan, schema, start(), lambda share: self.progress(self._own_share * share))

    def train(self, plan: Plan, corrections: Mapping[str, Tensor] | None) -> TrainResult:
        """Train the round's model: see `Loop.train`."""
        begun = self._own_share
        return self._train(plan, lambda share: self.progress(begun + (1 - begun) * share), corrections)

    def train_on_noise(self, plan: Plan, reason: str, restore: Callable[[], None]) -> bool:
        """Train on the noise of the job's loop alone, after a failure.

        A training diverges by its noise and its learning rate, whatever the samples are: then this one would, too.

        Args:
            plan: How the client trains.
            reason: Why the training has failed.
            restore: Gives the model the values that the round starts from.

        Returns:
            Whether the model was trained so.
        """
        if not loop_of(self.command.job).noisy or reason == "diverged":
            return False
        try:
            restore()
            self._train(plan, self.progress, on_nothing=True)
            return True
        except TrainingStopped:
            return False  # The round has ended.
        except Exception:  # the user's optimizer may raise anything
            log.exception("round %d: a training without samples failed, too", self.command.round)
            return False

    @property
    def _own_share(self) -> float:
        """The own model's share of the work; 0 = there is none."""
        return 0.5 if self.command.job.personal else 0.0

    def _train_own(
        self, plan: Plan, schema: Schema, start: Mapping[str, Tensor] | None, progress: Callable[[float], None]
    ) -> dict[str, Tensor] | None:
        return train_own(
            self.loaded.model,
            self.samples,
            plan,
            personal_of(self.command.job),
            loss=self.loaded.loss,
            optimizer_factory=self.loaded.optimizer,
            schema=schema,
            start=start,
            device=self.device,
            progress=progress,
            stopped=self.stopped,
        )

    def _train(
        self,
        plan: Plan,
        progress: Callable[[float], None],
        corrections: Mapping[str, Tensor] | None = None,
        *,
        on_nothing: bool = False,
    ) -> TrainResult:
        with job_code():
            return loop_of(self.command.job).train(
                self.loaded,
                self.samples,
                plan,
                device=self.device,
                progress=progress,
                stopped=self.stopped,
                corrections=corrections,
                on_nothing=on_nothing,
            )
