"""Users' code that raises an exception in one stage of a pipeline. Jobs name it as "faulty_stages:loss" and so on."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from fedring.data import Split, digits
from fedring.offers import offers

PASSES = 10
"""The number of micro-batches before the first failure."""

_losses = 0


class Fails(nn.Module):
    """A layer that returns its input for some micro-batches, and then fails in its forward or its backward."""

    def __init__(self, way: str, error: type[Exception], once: Path | None) -> None:
        super().__init__()
        self._way, self._error, self._once, self._passes = way, error, once, 0

    def forward(self, inputs: Tensor) -> Tensor:
        """Return `inputs`, of any shape."""
        self._passes += self.training
        if self._passes > PASSES and self._way == "forward":
            self._fail()
        if self._passes > PASSES and inputs.requires_grad:
            inputs.register_hook(self._fail)  # type: ignore[no-untyped-call]
        return inputs

    def _fail(self, gradient: Tensor | None = None) -> None:
        if self._once:
            try:
                self._once.touch(exist_ok=False)
            except FileExistsError:
                return
        raise self._error(f"no luck in the {self._way}")


@offers("model")
def net(stage: int = 0, way: str = "", error: str = "", once: Path | None = None) -> nn.Module:
    """Return a small network for the digits, one of whose three stages may fail.

    Args:
        stage: The stage that fails, if `way` is given.
        way: "forward" or "backward".
        error: The name of the exception.
        once: A file that does not exist yet; with it, only the first process that gets there fails.
    """
    errors = {each.__name__: each for each in (ValueError, RuntimeError, MemoryError, torch.OutOfMemoryError)}
    rest = [Fails(way, errors[error], once) if way and n == stage else nn.Identity() for n in range(3)]
    stages = [(nn.Linear(width, 32), nn.ReLU(), rest[n]) for n, width in enumerate((64, 32, 32))]
    return nn.Sequential(nn.Flatten(), *(layer for stage in stages for layer in stage), nn.Linear(32, 10))


@offers("loss")
def loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the cross entropy for some micro-batches, and then fail."""
    global _losses
    _losses += 1
    if _losses > PASSES:
        raise ValueError("no luck in the loss")
    return nn.functional.cross_entropy(outputs, labels)


class Unreadable(Dataset[Any]):
    """Samples of which one cannot be read."""

    def __init__(self, samples: Any) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == 1000:
            raise FileNotFoundError("no luck with sample 1000")
        inputs, labels = self._samples.batch(torch.tensor([index]))
        return inputs[0], labels[0]


@offers("data")
def samples(root: object, download: bool) -> Split:
    """Return the digits, of which one training sample cannot be read."""
    whole = digits()
    return Split(Unreadable(whole.train), whole.test, whole.classes)


@offers("data")
def some(root: Path | None, download: bool) -> Split:
    """Return the digits, without the last training sample if there is a file `fewer` in the client's data folder."""
    whole = digits()
    train: Any = whole.train
    fewer = root is not None and (root / "fewer").exists()
    return Split(train.subset(np.arange(len(train) - fewer)), whole.test, whole.classes)


@offers("data")
def none(root: object, download: bool) -> Split:
    """Return the digits without their training samples."""
    whole = digits()
    train: Any = whole.train
    return Split(train.subset(np.arange(0)), whole.test, whole.classes)


@offers("data")
def untested(root: object, download: bool) -> Split:
    """Return the digits without test samples."""
    whole = digits()
    test: Any = whole.test
    return Split(whole.train, Unreadable(test.subset(np.arange(0))), whole.classes)
