"""Losses to start with; each callable can be named in a job."""

from torch import Tensor
from torch.nn import functional


def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of logits `outputs` [batch, classes] and `labels` [batch] int64."""
    return functional.cross_entropy(outputs, labels)
