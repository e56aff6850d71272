"""How good a model is on samples that it was not trained on."""

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
    """Sums over samples: those of several clients add up to those of all their samples."""

    correct: int = 0
    total: int = 0
    loss_sum: float = 0.0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(self.correct + other.correct, self.total + other.total, self.loss_sum + other.loss_sum)


@torch.no_grad()
def evaluate(
    model: nn.Module, samples: Dataset[Any], *, loss: Loss, batch_size: int = 64, device: torch.device
) -> Counts:
    """The counts of `model` in evaluation mode on `samples`; its mode is as before afterwards.

    A small CNN is as fast with 32 as with 256 samples a batch, and takes 300 MB more with 512.
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
