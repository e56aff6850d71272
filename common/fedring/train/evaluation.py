"""The evaluation of a model on samples that it was not trained on."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from fedring.train.batches import fetch, size_of
from fedring.train.loop import Loss
from fedring.train.tally import Tally


@dataclass(frozen=True, slots=True)
class Counts:
    """Sums over samples; the counts of several clients add up to the counts of all their samples."""

    correct: int = 0  # samples whose largest output is that of their label
    total: int = 0  # samples
    loss_sum: float = 0.0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(self.correct + other.correct, self.total + other.total, self.loss_sum + other.loss_sum)


@torch.no_grad()
def evaluate(
    model: nn.Module, samples: Dataset[Any], *, loss: Loss, batch_size: int = 64, device: torch.device
) -> Counts:
    """Evaluate a model.

    Args:
        model: Is moved to `device`. It is in evaluation mode meanwhile, and in its former mode afterwards.
        samples: Any map-style dataset of pairs of an input and a label.
        loss: Returns the mean loss of a batch.
        batch_size: Samples per batch. A small CNN is as fast with 32 as with 256, and needs 300 MB more with 512.
        device: Where to compute.

    Returns:
        The counts over all samples.
    """
    if (size := size_of(samples)) == 0:
        return Counts()
    modes = [(module, module.training) for module in model.modules()]
    model.to(device).eval()
    tally = Tally(device)
    cuts = torch.split(torch.arange(size), batch_size)
    try:
        for inputs, labels in fetch(samples, cuts, device):
            outputs = model(inputs)
            tally.add(loss(outputs, labels), outputs, labels)
    finally:
        for module, training in modes:
            module.training = training
    return Counts(tally.correct, tally.total, tally.loss_sum)
