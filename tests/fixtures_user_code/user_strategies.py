"""Strategies of a user: some that work, and some that fail in one method."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedring.offers import offers
from fedring.server.aggregation.strategy import PastRound


@offers("rule")
class Recorded:
    """Chooses another learning rate each time that it is asked, and notes in a file when it is."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def configure(self, history: Sequence[PastRound]) -> Mapping[str, Any]:
        """Return a learning rate that depends on the number of calls."""
        with self.file.open("a") as file:
            file.write(f"{len(history)}\n")
        return {"lr": 1 / len(self.file.read_text().splitlines()), "epochs": np.int64(2)}


@offers("rule")
class Attentive:
    """Chooses from all that the history says, and reports what it finds in the model."""

    def configure(self, history: Sequence[PastRound]) -> Mapping[str, float]:
        """Return settings, of which each depends on the rounds before."""
        if not history:
            return {}
        last = history[-1]
        samples = sum(client.num_samples for client in last.clients.values())
        loss = sum(client.metrics["loss"] for client in last.clients.values())
        sign = 1 if last.metrics["server/weight"] > 0 and last.metrics["eval/accuracy"] > 0 and loss > 0 else -1
        return {
            "lr": sign * 0.1 / len(history),
            "sample_clients": 6 - len(history),
            "subset_size": samples // len(last.clients) // 2,
            "batch_size": 8 * len(history),
        }

    def evaluate(self, model: nn.Module) -> Mapping[str, Any]:
        """Return numbers of several types."""
        weight = next(model.parameters())
        return {"weight": weight.abs().max(), "count": weight.numel(), "training": float(model.training)}


@offers("rule")
class Faulty:
    """Fails in one of its methods, as its arguments say."""

    def __init__(self, configure: str = "", evaluate: str = "") -> None:
        self.fails = {"configure": configure, "evaluate": evaluate}

    def configure(self, history: Sequence[PastRound]) -> Any:
        """Fail, or choose nothing."""
        return self._result("configure") or {}

    def evaluate(self, model: nn.Module) -> Any:
        """Fail, or report something."""
        return self._result("evaluate") or {"fine": 1.0}

    def _result(self, method: str) -> Any:
        match self.fails[method]:
            case "raises":
                raise ZeroDivisionError("no rounds\nto divide by")
            case "exits":
                raise SystemExit(3)
            case "needs memory":
                raise MemoryError
            case "type":
                return 0.1
            case "nan":
                return {"lr": float("nan")}
            case "key":
                return {"rounds": 7}
            case "value":
                return {"lr": -1.0}
            case "text":
                return {"lr": "0.1"}
            case "whole":
                return {"epochs": 1.5}
            case "large":
                return {"epochs": 10**400}
            case "tensor":
                return {"lr": torch.zeros(3)}
            case "name":
                return {"lr rate": 1.0}
        return None


@offers("rule")
class Sum:
    """Adds up all parameters."""

    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        """Return the sum."""
        return {"sum": float(sum(parameter.double().sum() for parameter in model.parameters()))}


@offers("rule")
class NeedsMemory:
    """A rule that needs more memory than there is."""

    def combine(self, deltas: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
        """Try to allocate a petabyte."""
        return np.empty(1 << 50) + deltas


@offers("rule")
class Exits:
    """A rule that wants to end the process."""

    def coefficients(self, gram: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
        """Exit."""
        raise SystemExit(4)


@offers("rule")
class Nothing:
    """Has none of the methods."""
