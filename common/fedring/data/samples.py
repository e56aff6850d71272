"""Labelled samples in memory, and the error of samples.

Samples are taken a whole batch at a time.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from fedring.job_code import OwnError, job_code


class DataError(OwnError):
    """The samples cannot be loaded or divided.

    Attributes:
        reason: A stable word for the fault; the text is one sentence that also says what to do.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True, slots=True, eq=False)
class Scale:
    """A map from stored values to a model's inputs, by channel.

    It is (value - mean) / std.
    """

    mean: Tensor  # [channels, 1, 1] float32, in stored units
    std: Tensor  # [channels, 1, 1] float32, > 0

    def apply(self, values: Tensor) -> Tensor:
        """Return the inputs, float32, for stored `values`, both [batch, channels, height, width]."""
        return values.to(torch.float32, copy=True).sub_(self.mean).div_(self.std)


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """A data set in memory: pairs of an input and a label.

    With a `scale`, inputs stay as they were read, often with one byte per pixel, and become float32 when a batch is
    taken. That needs a quarter of the memory, and costs a few microseconds per batch.
    """

    def __init__(self, inputs: Tensor, labels: Tensor, scale: Scale | None = None) -> None:
        """Keep `inputs` and `labels`, without a copy.

        Args:
            inputs: [n, ...], of any dtype.
            labels: [n, ...]; int64 if they are classes.
            scale: How inputs become float32; None leaves them as they are.

        Raises:
            DataError: With the reason bad_samples, if the numbers of inputs and labels differ.
        """
        if len(inputs) != len(labels):
            raise DataError(
                "bad_samples",
                f"There are {len(inputs)} inputs and {len(labels)} labels: give one label for each input.",
            )
        self.inputs = inputs  # [n, ...]
        self.labels = labels  # [n, ...]
        self.scale = scale

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        values = self.inputs[index]
        return (self.scale.apply(values) if self.scale else values), self.labels[index]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Return the samples at `indices`, one by one.

        torch's DataLoader calls this instead of __getitem__.
        """
        inputs, labels = self.batch(torch.as_tensor(indices, dtype=torch.int64))
        return list(zip(inputs, labels, strict=True))

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs and labels at `indices` [batch] int64, [batch, ...] each."""
        values = self.inputs.index_select(0, indices)
        return (self.scale.apply(values) if self.scale else values), self.labels.index_select(0, indices)

    def subset(self, indices: NDArray[np.int64]) -> "Samples":
        """Return a copy of the samples at `indices` [n].

        It does not keep the other samples in memory.
        """
        chosen = torch.from_numpy(np.array(indices, np.int64))
        return Samples(self.inputs.index_select(0, chosen), self.labels.index_select(0, chosen), self.scale)


class SamplesView(Dataset[tuple[Tensor, Tensor]]):
    """Some samples of a data set in memory, without a copy.

    Args:
        samples: All samples.
        indices: Those of the view, [n].
    """

    def __init__(self, samples: Samples, indices: NDArray[np.int64]) -> None:
        self.samples, self.indices = samples, torch.from_numpy(indices)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.samples[int(self.indices[index])]

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """See Samples.batch."""
        return self.samples.batch(self.indices.index_select(0, indices))


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """The return value of a data callable: training and test samples.

    Each is a Samples or another map-style dataset of pairs.
    """

    train: Dataset[Any]
    test: Dataset[Any]
    classes: int  # labels are 0 to classes - 1


@dataclass(frozen=True, slots=True)
class ClientPart:
    """The client for which a data callable is called.

    A callable that declares the parameter `part` is given one, and returns the samples of that client alone. The
    default stands for all samples: a server, an evaluation without clients, and workers that share each batch have it.
    """

    index: int = 0  # the client's number, 0 to count - 1
    count: int = 1  # clients that share a data set
    client_id: str = ""


def takes_part(data: Callable[..., Any]) -> bool:
    """Return whether a data callable declares the parameter `part`."""
    try:
        return "part" in inspect.signature(data).parameters
    except (TypeError, ValueError):  # a builtin may have no signature
        return False


def load_split(data: Callable[..., Any], root: Path | None, download: bool, part: ClientPart | None = None) -> Split:
    """Return the Split of a user's data callable.

    Args:
        data: The callable.
        root: Folder of the data sets.
        download: Whether it may download.
        part: The client, for a callable that declares the parameter; None = all samples.

    Raises:
        DataError: That of the callable itself; with the reason no_data, if it raises another error, or returns
            something else than a Split.
    """
    try:
        with job_code():
            split = data(root, download, part=part or ClientPart()) if takes_part(data) else data(root, download)
    except DataError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise DataError("no_data", f"The data cannot be loaded: {type(error).__name__}: {error}.") from error
    if not isinstance(split, Split):
        raise DataError("no_data", f"The data callable returned a {type(split).__name__}: let it return a Split.")
    return split
