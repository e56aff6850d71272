"""Batches of any map-style dataset: drawn, cut and fetched."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fedring.train.errors import TrainError


@runtime_checkable
class Batched(Protocol):
    """A dataset that hands out whole batches, with no Python object per sample."""

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """The inputs and labels at `indices` [batch] int64, stacked."""
        ...


def size_of(samples: Dataset[Any]) -> int:
    """The number of samples; TrainError if the dataset does not know it."""
    length = getattr(samples, "__len__", None)
    if length is None:
        raise TrainError("no_length", f"{type(samples).__name__} has no length: use a map-style dataset.")
    return int(length())


def draw(size: int, wanted: int, generator: torch.Generator) -> Tensor:
    """`wanted` of the indices below `size`, drawn without replacement; all of them if `wanted` is 0 or too many."""
    if not 0 < wanted < size:
        return torch.arange(size)
    return torch.randperm(size, generator=generator)[:wanted]


def cut(order: Tensor, batch_size: int) -> Sequence[Tensor]:
    """`order` [n] in pieces of `batch_size`; one left over joins the last piece, as BatchNorm fails on one."""
    sizes = [batch_size] * (len(order) // batch_size)
    if (rest := len(order) % batch_size) == 1 and sizes:
        sizes[-1] += 1
    elif rest:
        sizes.append(rest)
    return torch.split(order, sizes)


def fetch(samples: Dataset[Any], cuts: Sequence[Tensor], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """The inputs and labels of each batch of indices in `cuts`, on `device`."""
    if isinstance(samples, Batched):
        for indices in cuts:
            inputs, labels = samples.batch(indices)
            yield inputs.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        return
    # A generator of its own: else the loader draws from the global one, which drives dropout.
    loader = DataLoader(samples, batch_sampler=[i.tolist() for i in cuts], generator=torch.Generator())
    for batch in loader:
        if not (isinstance(batch, list | tuple) and len(batch) == 2 and all(isinstance(t, Tensor) for t in batch)):
            raise TrainError("bad_batch", "A sample must be a pair of an input and a label, both tensors or numbers.")
        yield batch[0].to(device, non_blocking=True), batch[1].to(device, non_blocking=True)
