"""Sums of losses and right answers over batches.

What single batches add stays on the device until a sum is read.
"""

import torch
from torch import Tensor

from fedring.train.plan import TrainResult

_PENDING = 512  # the most batches whose figures stay on the device


class Tally:
    """The loss and the right answers so far.

    Adding a batch does not wait for the device, but reading a sum does.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Set all sums to 0."""
        self.total = 0
        self._loss_sum = self._correct = 0.0
        self._losses: list[tuple[Tensor, int]] = []  # mean losses that are not in the sum yet, and their batches' sizes
        self._right: list[Tensor] = []  # right answers that are not in the sum yet
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
        size = len(labels)
        self.total += size
        self._losses.append((loss.detach().reshape(()), size))
        right = right_answers(outputs.detach(), labels)
        if right is not None:
            self._classified = True
            self._right.append(right.sum())
        if len(self._losses) == _PENDING:
            self._read()

    @property
    def classified(self) -> bool:
        """Whether right answers were counted."""
        return self._classified

    @property
    def loss_sum(self) -> float:
        """The sum of the samples' losses."""
        self._read()
        return self._loss_sum

    @property
    def correct(self) -> int:
        """The number of samples that are classified correctly.

        The largest output of such a sample is that of its label. It is 0 if labels are not classes. A sample of several
        labels counts as the share of them that is right, and the sum is rounded.
        """
        self._read()
        return round(self._correct)

    def result(self, num_samples: int, seconds: float, steps: int) -> TrainResult:
        """Return the means over all batches, with facts about the training."""
        accuracy = self.correct / self.total if self._classified else None
        return TrainResult(num_samples, self.loss_sum / self.total, accuracy, seconds, steps)

    def _read(self) -> None:
        """Add up in float64, one batch after the other."""
        if self._losses:
            losses = _values([loss for loss, _ in self._losses])
            for loss, (_, size) in zip(losses, self._losses, strict=True):
                self._loss_sum += loss * size
            self._losses.clear()
        if self._right:
            self._correct = sum(_values(self._right), self._correct)
            self._right.clear()


def right_answers(outputs: Tensor, labels: Tensor) -> Tensor | None:
    """Return which answers of a batch are right, [batch].

    A sample of several labels counts as the share of them that is right.

    Args:
        outputs: As for Tally.add().
        labels: As for Tally.add().

    Returns:
        The answers; None if the labels are not classes.
    """
    if outputs.ndim < 2 or outputs.shape[:1] + outputs.shape[2:] != labels.shape or labels.is_floating_point():
        return None
    right = outputs.argmax(1) == labels  # never where the label is below 0
    if labels.ndim > 1:
        counted = (labels >= 0).reshape(len(labels), -1).sum(1)
        right = right.reshape(len(labels), -1).sum(1) / counted.clamp(min=1)
    return right


def _values(scalars: list[Tensor]) -> list[float]:
    """Return the values of scalars, which come from their device at once."""
    return [scalars[0].item()] if len(scalars) == 1 else torch.stack(scalars).tolist()
