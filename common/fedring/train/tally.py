"""Sums of losses and right answers over batches, which stay on the device until they are read."""

import torch
from torch import Tensor

from fedring.train.plan import TrainResult


class Tally:
    """The loss and the right answers so far. Adding a batch does not wait for the device, but reading a sum does."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.clear()

    def clear(self) -> None:
        """Set all sums to 0."""
        self.total = 0
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
        self._correct = torch.zeros((), dtype=torch.int64, device=self._device)
        self._classified = False

    def add(self, loss: Tensor, outputs: Tensor, labels: Tensor) -> None:
        """Count a batch.

        Args:
            loss: The mean loss of the batch, a scalar.
            outputs: [batch, ...]; answers are counted if they are [batch, classes].
            labels: [batch, ...]; answers are counted if they are integers [batch].
        """
        self.total += len(labels)
        self._loss_sum.add_(loss.detach(), alpha=len(labels))
        if outputs.ndim == 2 and labels.ndim == 1 and not labels.is_floating_point():
            self._classified = True
            self._correct += (outputs.detach().argmax(1) == labels).sum()

    @property
    def classified(self) -> bool:
        """Whether right answers were counted."""
        return self._classified

    @property
    def loss_sum(self) -> float:
        """The sum of the samples' losses."""
        return float(self._loss_sum)

    @property
    def correct(self) -> int:
        """The number of samples whose largest output is that of their label; 0 if labels are not classes."""
        return int(self._correct)

    def result(self, num_samples: int, seconds: float, steps: int) -> TrainResult:
        """Return the means over all batches, together with the given facts about the training."""
        accuracy = self.correct / self.total if self._classified else None
        return TrainResult(num_samples, self.loss_sum / self.total, accuracy, seconds, steps)
