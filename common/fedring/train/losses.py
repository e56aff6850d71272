"""Losses that come with fedring; a job can name each of them."""

from torch import Tensor
from torch.nn import functional

from fedring.offers import offers


@offers("loss")
def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy, a scalar.

    Args:
        outputs: Logits [batch, classes].
        labels: [batch] int64.
    """
    return functional.cross_entropy(outputs, labels)
