"""Sums over batches that stay on the device until they are asked for."""

import torch
from torch import Tensor

from fedring.train.plan import TrainResult


class Tally:
    """Losses and right answers so far; adding a batch does not wait for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.clear()

    def clear(self) -> None:
        """Afterwards nothing has been counted."""
        self.total = 0
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
        self._correct = torch.zeros((), dtype=torch.int64, device=self._device)
        self._classified = False

    def add(self, loss: Tensor, outputs: Tensor, labels: Tensor) -> None:
        """Count a batch whose mean `loss` is a scalar, with `outputs` [batch, ...] and `labels` [batch, ...]."""
        self.total += len(labels)
        self._loss_sum.add_(loss.detach(), alpha=len(labels))
        if outputs.ndim == 2 and labels.ndim == 1 and not labels.is_floating_point():
            self._classified = True
            self._correct += (outputs.detach().argmax(1) == labels).sum()

    @property
    def classified(self) -> bool:
        """Whether right answers could be counted."""
        return self._classified

    @property
    def loss_sum(self) -> float:
        """The sum of the samples' losses."""
        return float(self._loss_sum)

    @property
    def correct(self) -> int:
        """The samples whose largest output is that of their label; 0 if labels are not classes."""
        return int(self._correct)

    def result(self, num_samples: int, seconds: float, steps: int) -> TrainResult:
        """The means, with what else is known about the training."""
        accuracy = self.correct / self.total if self._classified else None
        return TrainResult(num_samples, self.loss_sum / self.total, accuracy, seconds, steps)
