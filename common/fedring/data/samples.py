"""Labelled samples in memory, handed out a whole batch at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from fedring.data.errors import DataError


@dataclass(frozen=True, slots=True, eq=False)
class Scale:
    """What maps stored values to a model's inputs: (value - mean) / std, channel by channel."""

    mean: Tensor  # [channels, 1, 1] float32, in stored units
    std: Tensor  # [channels, 1, 1] float32, > 0

    def apply(self, values: Tensor) -> Tensor:
        """The inputs, float32, of `values` [batch, channels, height, width]."""
        return values.to(torch.float32).sub_(self.mean).div_(self.std)


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Pairs of an input and a label.

    With a `scale` the inputs are stored as they are, often one byte a pixel, and become float32 as a batch is taken:
    a quarter of the memory, for a few microseconds a batch.
    """

    def __init__(self, inputs: Tensor, labels: Tensor, scale: Scale | None = None) -> None:
        if len(inputs) != len(labels):
            raise DataError("bad_samples", f"There are {len(inputs)} inputs for {len(labels)} labels; give one each.")
        self.inputs = inputs  # [n, ...]
        self.labels = labels  # [n, ...]
        self.scale = scale

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        values = self.inputs[index]
        return (self.scale.apply(values) if self.scale else values), self.labels[index]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """The samples at `indices`, one by one, as a torch DataLoader asks for them."""
        inputs, labels = self.batch(torch.as_tensor(indices, dtype=torch.int64))
        return list(zip(inputs, labels, strict=True))

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """The inputs and labels at `indices` [batch] int64, stacked."""
        values = self.inputs.index_select(0, indices)
        return (self.scale.apply(values) if self.scale else values), self.labels.index_select(0, indices)

    def subset(self, indices: NDArray[np.int64]) -> "Samples":
        """A copy of the samples at `indices`, that keeps nothing of the others alive."""
        chosen = torch.from_numpy(np.array(indices, np.int64))
        return Samples(self.inputs.index_select(0, chosen), self.labels.index_select(0, chosen), self.scale)


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """What a data callable returns: Samples, or any map-style datasets of (input, label)."""

    train: Dataset[Any]
    test: Dataset[Any]
    classes: int  # labels are 0 to classes - 1
