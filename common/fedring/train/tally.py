"""Sums of losses and right answers over batches.

They stay on the device until they are read.
"""

import torch
from torch import Tensor

from fedring.train.plan import TrainResult


class Tally:
    """The loss and the right answers so far.

    Adding a batch does not wait for the device, but reading a sum does.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.clear()

    def clear(self) -> None:
        """Set all sums to 0."""
        self.total = 0
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
        self._correct = torch.zeros((), dtype=torch.float64, device=self._device)
        self._classified = False

    def add(self, loss: Tensor, outputs: Tensor, labels: Tensor) -> None:
        """Count a batch.

        Args:
            loss: The mean loss of the batch, a scalar.
            outputs: [batch, ...]; answers are counted if they are [batch, classes], or [batch, classes, ...] of several
                labels each.
            labels: [batch, ...]; answers are counted if they are integers [batch], or [batch, ...]. Of several, those
                below 0 do not count, as cross_entropy ignores -100.
        """
        self.total += len(labels)
        self._loss_sum.add_(loss.detach(), alpha=len(labels))
        if (
            outputs.ndim > 1
            and outputs.shape[:1] + outputs.shape[2:] == labels.shape
            and not labels.is_floating_point()
        ):
            self._classified = True
            right = outputs.detach().argmax(1) == labels  # never where the label is below 0
            if labels.ndim > 1:
                counted = (labels >= 0).reshape(len(labels), -1).sum(1)
                right = right.reshape(len(labels), -1).sum(1) / counted.clamp(min=1)
            self._correct += right.sum()

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
        """The number of samples that are classified correctly.

        The largest output of such a sample is that of its label. It is 0 if labels are not classes. A sample of several
        labels counts as the share of them that is right, and the sum is rounded.
        """
        return round(float(self._correct))

    def result(self, num_samples: int, seconds: float, steps: int) -> TrainResult:
        """Return the means over all batches, with facts about the training."""
        accuracy = self.correct / self.total if self._classified else None
        return TrainResult(num_samples, self.loss_sum / self.total, accuracy, seconds, steps)
