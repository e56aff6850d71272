"""An algorithm as docs/algorithms.md describes one: it shortens each round's step, and counts the rounds.

It reads only what the interface of transforms gives it. `test_transforms` puts this folder into the room of algorithms.
"""

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from fedring.server.aggregation.rule import Rule
from fedring.server.model.transforms.transform import Algorithm, ClosedRound, StatefulStep, States


class Args(BaseModel):
    """The arguments of halved."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    by: float = Field(2.0, gt=0, description="the step is divided by it")


class Halved(Algorithm[Args]):
    """The server half of halved."""

    name: ClassVar[str] = "halved"
    takes: ClassVar[type[BaseModel]] = Args

    def close(self, closed: ClosedRound, rule: Rule | None) -> StatefulStep:
        return _Half(self.args.by)


class _Half(StatefulStep):
    def __init__(self, by: float) -> None:
        self._by, self._rounds = by, np.zeros(1, np.float32)

    def begin(self, before: States, length: int) -> None:
        self._rounds = before.get("rounds", self._rounds) + np.float32(1)

    def piece(self, start: int, delta: NDArray[np.float64]) -> None:
        delta /= self._by

    def state(self) -> States:
        return {"rounds": self._rounds}
