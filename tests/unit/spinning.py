"""Strategies that a job should not have: one burns a core until a test releases it, others fail."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from fedring.offers import offers

WORDS = "\ud800 and \0, which no database takes"
BEGAN, RELEASED = threading.Event(), threading.Event()


def _spin() -> None:
    BEGAN.set()
    while not RELEASED.is_set():
        sum(range(100))


@offers("rule")
class Spins:
    """Burns a core in the method that its argument names."""

    def __init__(self, where: str) -> None:
        self.where = where

    def configure(self, history: Sequence[Any]) -> Mapping[str, float]:
        """Return no settings."""
        if self.where == "configure":
            _spin()
        return {}

    def combine(self, deltas: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the mean."""
        if self.where == "combine":
            _spin()
        return weights @ deltas

    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        """Return no figures."""
        if self.where == "evaluate":
            _spin()
        return {}


@offers("rule")
class Fails:
    """Fails as it combines."""

    def combine(self, deltas: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
        """Raise an error."""
        raise ValueError("a fault of the user's")


@offers("rule")
class Mumbles:
    """Fails in the method that its argument names, with words that cannot be kept as they are."""

    def __init__(self, where: str) -> None:
        self.where = where
        self._fail("init")

    def configure(self, history: Sequence[Any]) -> Mapping[str, float]:
        """Return no settings, or fail."""
        self._fail("configure")
        return {}

    def combine(self, deltas: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the mean, or fail."""
        self._fail("combine")
        return weights @ deltas

    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        """Return no figures, or fail."""
        self._fail("evaluate")
        return {}

    def _fail(self, where: str) -> None:
        if where == self.where:
            raise ValueError(WORDS)
