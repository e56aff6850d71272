"""Parts of jobs that are simulated."""

import multiprocessing
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Subset

from fedring.data import ClientPart, Samples, Split, digits
from fedring.offers import offers


@offers("model")
def normed(width: int = 24) -> nn.Module:
    """Build a network for the 8 x 8 digits, with buffers of both kinds and with random numbers in each step."""
    hidden = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2))
    return nn.Sequential(hidden, nn.Linear(width, 10))


def half_frozen() -> nn.Module:
    """Build a network whose first layer is zero and frozen."""
    first = nn.Linear(64, 8).requires_grad_(False)
    nn.init.zeros_(first.weight)
    return nn.Sequential(nn.Flatten(), first, nn.Linear(8, 10))


def thaws(model: nn.Module, samples: Any, plan: Any) -> dict[str, float]:
    """Report a parameter that is frozen, and add 1 to it if the seed is odd."""
    frozen = next(model.parameters())
    found = float(frozen[0, 0])
    if plan.seed % 2:
        frozen.add_(1)
    return {"num_samples": len(samples), "loss": 1.0, "frozen": found}


def drawn(root: Path | None, download: bool) -> Split:
    """Return samples that torch draws without a seed, of which every process must have the same ones."""
    inputs, labels = torch.randn(300, 1, 8, 8), torch.randint(10, (300,))
    return Split(Samples(inputs[:200], labels[:200]), Samples(inputs[200:], labels[200:]), classes=10)


@offers("data")
def few(root: Path | None, download: bool, count: int) -> Split:
    """Return so many of the digits, which torch draws without a seed."""
    split = digits(root, download)
    return Split(Subset(split.train, torch.randperm(1000)[:count].tolist()), split.test, split.classes)


@offers("data")
def nines(root: Path | None, download: bool) -> Split:
    """Return the digits that are nines."""
    split = digits(root, download)
    assert isinstance(split.train, Samples)
    return Split(split.train.subset((split.train.labels == 9).nonzero()[:, 0].numpy()), split.test, split.classes)


def add_number(model: nn.Module, samples: Any, plan: Any) -> dict[str, float]:
    """Add the number of the round to each parameter, instead of a training."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(plan.job_round)
    return {"num_samples": len(samples), "loss": 1.0, "rounds": plan.job_round}


def fills_with_ones(model: nn.Module, samples: Any, plan: Any) -> int:
    """Set all parameters to 1, whatever they are."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1)
    return len(samples)


def fails_for_some(model: nn.Module, samples: Any, plan: Any) -> int:
    """Fail where the client's own seed is odd."""
    if plan.seed % 2:
        raise RuntimeError("an odd seed")
    return len(samples)


def adds_or_fails(model: nn.Module, samples: Any, plan: Any) -> int:
    """Add 1 to all parameters; fail if the sum of the labels is odd."""
    if sum(int(label) for _, label in samples) % 2:
        raise RuntimeError("an odd sum")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    return len(samples)


def fails(model: nn.Module, samples: Any, plan: Any) -> int:
    """Fail always."""
    raise RuntimeError("this trainer never works")


def cannot_count_to_9(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss of the digits from 0 to 8."""
    if labels.max().item() == 9:
        raise RuntimeError("a nine")
    return nn.functional.cross_entropy(outputs, labels)


def tells_threads(model: nn.Module, samples: Any, plan: Any) -> dict[str, float]:
    """Report the number of torch's threads."""
    return {"num_samples": len(samples), "loss": 1.0, "threads": torch.get_num_threads()}


def no_data(root: Path | None, download: bool) -> Split:
    """Fail to load samples."""
    raise OSError("there is no data")


def median_label(model: nn.Module, samples: Any) -> dict[str, float]:
    """Report the median label, which is not a mean over parts, and the number of samples."""
    return {"loss": 1.0, "median": float(samples.labels.median()), "samples": float(len(samples))}


def dies(model: nn.Module, samples: Any, plan: Any) -> int:
    """End the process, unless it is the first one, and train nothing there."""
    if multiprocessing.parent_process() is not None:
        os._exit(3)
    return 1


def no_evaluation(model: nn.Module, samples: Any) -> Any:
    """Fail to evaluate."""
    raise RuntimeError("nothing to compare with")


def own_digits(root: object, download: bool, part: ClientPart) -> Split:
    """Return other digits for each client: as many as its number says, and one test sample."""
    whole, first = digits(), 20 * part.index
    train = [*range(first, first + 10 + part.index)]
    return Split(Subset(whole.train, train), Subset(whole.test, [part.index]), whole.classes)


@offers("data")
def own_but_whole(root: object, download: bool, part: ClientPart) -> Split:
    """Return own digits, and nothing for everybody together."""
    if part.count == 1:
        raise ValueError("this is the data of everybody")
    return own_digits(root, download, part)
