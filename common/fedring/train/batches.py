"""Batches of any map-style dataset: drawing, cutting and fetching them."""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

from fedring.train.errors import TrainError

Inputs = Tensor | dict[str, Tensor]
"""The inputs of a model for a batch: [batch, ...], or several of them by the names of its forward's arguments."""


def size_of(samples: Dataset[Any]) -> int:
    """Return the number of samples.

    Raises:
        TrainError: With the reason no_length, if the dataset has no length.
    """
    length = getattr(samples, "__len__", None)
    if length is None:
        raise TrainError("no_length", f"{type(samples).__name__} has no length: use a map-style dataset.")
    return int(length())


def draw(size: int, wanted: int, generator: torch.Generator) -> Tensor:
    """Draw samples without replacement.

    Args:
        size: The number of samples.
        wanted: How many to draw; 0, or a number not below `size`, means all of them, in their order.
        generator: The source of randomness.

    Returns:
        The indices of the samples, [n] int64.
    """
    if not 0 < wanted < size:
        return torch.arange(size)
    return torch.randperm(size, generator=generator)[:wanted]


def cut(order: Tensor, batch_size: int) -> Sequence[Tensor]:
    """Cut the indices `order` [n] into batches: see `ends`."""
    stops = ends(len(order), batch_size)
    return [order[start:end] for start, end in zip([0, *stops], stops, strict=False)]


def ends(size: int, batch_size: int) -> list[int]:
    """Return where each batch of `size` samples ends.

    A single sample that is left over joins the last batch, because BatchNorm fails on a batch of one.
    """
    stops = [*range(batch_size, size + 1, batch_size)]
    if (rest := size % batch_size) == 1 and stops:
        stops[-1] = size
    elif rest:
        stops.append(size)
    return stops


def fetch(samples: Dataset[Any], cuts: Sequence[Tensor], device: torch.device) -> Iterator[tuple[Inputs, Tensor]]:
    """Yield inputs and labels [batch, ...] of each batch of indices.

    The batches of indices are `cuts`; tensors are moved to `device`. Samples with a method `batch`, as
    `fedring.data.Samples` has it, are asked for whole batches, which takes no Python object for each sample. It is
    given indices [batch] int64, and returns inputs and labels [batch, ...].

    Raises:
        TrainError: With the reason bad_batch, if a sample is not a pair of inputs and a label, or if the samples of a
            batch have inputs of different names.
    """
    take: Callable[[Tensor], tuple[Inputs, Tensor]] | None = getattr(samples, "batch", None)
    if take is not None:
        for indices in cuts:
            inputs, labels = take(indices)
            yield _moved(inputs, device), labels if labels.device == device else labels.to(device, non_blocking=True)
        return
    # The loader would otherwise draw a seed from the global generator, which also drives dropout.
    loader = DataLoader(
        samples, batch_sampler=[i.tolist() for i in cuts], generator=torch.Generator(), collate_fn=_collated
    )
    for batch in loader:
        if not (isinstance(batch, list | tuple) and len(batch) == 2 and isinstance(batch[1], Tensor)):
            raise TrainError(
                "bad_batch", "A sample must be a pair of inputs and a label, which are tensors or numbers."
            )
        yield _moved(batch[0], device), batch[1].to(device, non_blocking=True)


def diverged(samples: Dataset[Any], cuts: Sequence[Tensor], lr: float) -> TrainError:
    """Return the error of a training whose loss is not finite.

    The samples are read once more, since NaN in them is mended in another way than a learning rate that is too high.

    Args:
        samples: The samples.
        cuts: The indices of each batch that was trained on, in their order.
        lr: The learning rate.

    Returns:
        The error, with the reason bad_batch, if a sample has a value that is not finite, or else diverged.
    """
    for number, (indices, (inputs, labels)) in enumerate(
        zip(cuts, fetch(samples, cuts, torch.device("cpu")), strict=True), start=1
    ):
        given = {"inputs": inputs} if isinstance(inputs, Tensor) else inputs
        for what, tensor in [*given.items(), ("label", labels)]:
            bad = ~torch.isfinite(tensor).flatten(1).all(1) if tensor.dim() > 1 else ~torch.isfinite(tensor)
            if bad.any():
                first = int(bad.nonzero()[0]) if bad.dim() else 0
                where = f"sample {int(indices[first])} of this client, in batch {number} of the epoch"
                return TrainError(
                    "bad_batch", f"NaN or infinity in {where}, in its {what}: mend or remove such samples."
                )
    return TrainError("diverged", f"The loss is not finite: use a learning rate below {lr:g}.")


def apply(model: nn.Module, inputs: Inputs) -> Tensor:
    """Return the outputs of a model.

    Inputs by name are the arguments of its forward.
    """
    outputs: Tensor = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    return outputs


def by_name(batches: Sequence[Inputs], names: Collection[str]) -> dict[str, list[Tensor]]:
    """Return the tensors of several batches by name.

    Args:
        batches: The inputs of each batch; a tensor alone is called "inputs".
        names: The tensors to return. If it is "inputs" alone, the only tensor of a batch is that, whatever its name is.

    Raises:
        TrainError: With the reason bad_batch, if a batch does not have one of them.
    """
    found: dict[str, list[Tensor]] = {name: [] for name in names}
    for inputs in batches:
        given = {"inputs": inputs} if isinstance(inputs, Tensor) else inputs
        # A model with one input takes any name: samples need not call theirs "inputs".
        if set(names) == {"inputs"} and len(given) == 1:
            given = {"inputs": next(iter(given.values()))}
        for name, tensors in found.items():
            if name not in given:
                raise TrainError("bad_batch", f"The model takes {name!r}, but the samples have {', '.join(given)}.")
            tensors.append(given[name])
    return found


def _collated(samples: list[Any]) -> Any:
    """Return the samples as a batch with all their inputs.

    torch alone would leave out an input that the first sample does not have.
    """
    pairs = (one for one in samples if isinstance(one, list | tuple) and len(one) == 2)
    names = [sorted(map(str, inputs)) for inputs, _ in pairs if isinstance(inputs, dict)]
    if other := next((found for found in names if found != names[0]), None):
        raise TrainError(
            "bad_batch",
            f"The samples of a batch have different inputs, such as {', '.join(names[0])} and {', '.join(other)}: give "
            "all samples the same ones.",
        )
    return default_collate(samples)


def _moved(inputs: object, device: torch.device) -> Inputs:
    if isinstance(inputs, Tensor):
        return inputs if inputs.device == device else inputs.to(device, non_blocking=True)
    if not isinstance(inputs, dict) or not all(isinstance(tensor, Tensor) for tensor in inputs.values()):
        raise TrainError(
            "bad_batch",
            "The inputs of a sample must be a tensor, a number, or a dict of them by the names of arguments.",
        )
    return {name: tensor.to(device, non_blocking=True) for name, tensor in inputs.items()}
