"""The server optimizer, and its step by the combined delta."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np

from fedring.codec.errors import CodecError
from fedring.codec.schema import Schema
from fedring.server.aggregation.modelfile import LoadedModel
from fedring.server.aggregation.rule import OptimizerError, Rule
from fedring.server.aggregation.steps import BaseFiles, Draft, Step
from fedring.server.aggregation.walk import gather, tiles_of
from fedring.server.model.transforms.transform import ClosedRound, Feature, Skeleton
from fedring.server.state.rows import ModelRow
from fedring.train.jobs.job import Job
from fedring.train.jobs.job_keys import ServerOptimizer as Chosen

if TYPE_CHECKING:
    from fedring.server.aggregation.optimizer import ServerOptimizer


@dataclass(frozen=True, slots=True)
class Optimizing(Feature):
    """The table [server_optimizer]."""

    chosen: Chosen

    @classmethod
    def of(cls, job: Job) -> Self | None:
        """See Feature.of."""
        return cls(job.server_optimizer) if job.server_optimizer else None

    def check(self, job: Job, schema: Schema, skeleton: Skeleton) -> None:
        """See Transform.check."""
        try:
            self._optimizer()
        except OptimizerError as error:
            raise ValueError(f"server_optimizer: {error}") from error

    def close(self, closed: ClosedRound, rule: Rule | None) -> Step:
        """See Transform.close."""
        return Optimized(self._optimizer())

    def _optimizer(self) -> "ServerOptimizer":
        from fedring.server.aggregation.optimizer import ServerOptimizer  # imports torch

        return ServerOptimizer(self.chosen.name, self.chosen.args)


class Optimized(Step):
    """One step of the server optimizer.

    Args:
        optimizer: whose step it is.
        state: that its step before has returned; empty = there was none.
    """

    whole: ClassVar[bool] = True

    def __init__(self, optimizer: "ServerOptimizer", state: bytes = b"") -> None:
        self._optimizer, self._state = optimizer, state

    def read(self, base: ModelRow, files: BaseFiles) -> None:
        """See Step.read."""
        self._state = files.read(base.optimizer_blob)

    def change(self, base: LoadedModel, draft: Draft) -> Draft:
        """See Step.change."""
        before = base.vectors().parameters
        deltas = draft.deltas(lambda _start, _base, delta: delta.astype(np.float32))
        parameters, state = self._optimizer.step(before, gather(deltas, np.empty_like(before)), self._state)
        if not np.isfinite(parameters).all():
            raise CodecError("non_finite", "the server optimizer's step does not fit into float32")
        return replace(draft, parameters=lambda: tiles_of(parameters), files={**draft.files, "optimizer_blob": state})
