"""Code of jobs that tries to end the process which calls it, as argparse does, and as people's main functions do."""

import sys
import threading
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedring.data import Split
from fedring.data import digits as all_digits
from fedring.offers import offers


@offers("model")
def model() -> nn.Module:
    """A model that ends the process in the clients, when it computes."""
    return Exits()


class Exits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 10)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        sys.exit("usage: train [--lr LR]")


@offers("data")
def data(root: Path | None, download: bool) -> Split:
    """Samples of which the first ends the process."""
    split = all_digits(root, download)
    return Split(Endless(len(split.train)), split.test, split.classes)  # type: ignore[arg-type]


class Endless(torch.utils.data.Dataset[Any]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        raise KeyboardInterrupt


@offers("data")
def loads(root: Path | None, download: bool) -> Split:
    """A function of data that ends the process."""
    sys.exit(0)


@offers("loss")
def loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    sys.exit(0)


@offers("optimizer")
def optimizer(parameters: Any, lr: float, momentum: float) -> torch.optim.Optimizer:
    """An optimizer whose steps end the process."""
    return Stops(parameters, lr)


class Stops(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise KeyboardInterrupt


@offers("trainer")
def trainer(model: nn.Module, samples: Any, plan: Any) -> int:
    sys.exit(0)


@offers("trainer")
def interrupts(model: nn.Module, samples: Any, plan: Any) -> int:
    raise KeyboardInterrupt


@offers("trainer")
def waits(model: nn.Module, samples: Any, plan: Any) -> int:
    """A trainer that never ends."""
    threading.Event().wait()
    return 1


@offers("evaluator")
def evaluator(model: nn.Module, samples: Any) -> Any:
    sys.exit()


@offers("evaluator")
def stops(model: nn.Module, samples: Any) -> Any:
    raise KeyboardInterrupt


@offers("rule")
class Rule:
    """A rule that ends the process when it has seen all updates."""

    def combine(self, deltas: Any, weights: Any) -> Any:
        sys.exit(3)


@offers("rule")
class Strategy:
    """A strategy that ends the process when it is asked for a round's settings."""

    def configure(self, past: Any) -> Any:
        raise KeyboardInterrupt
