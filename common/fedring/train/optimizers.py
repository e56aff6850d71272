"""Optimizers that come with fedring; a job can name each of them."""

from collections.abc import Iterable

import torch
from torch import nn


def sgd(parameters: Iterable[nn.Parameter], lr: float, momentum: float) -> torch.optim.Optimizer:
    """Return torch's stochastic gradient descent, with one fused kernel for all tensors."""
    return torch.optim.SGD(parameters, lr=lr, momentum=momentum, fused=True)


def adam(parameters: Iterable[nn.Parameter], lr: float, momentum: float) -> torch.optim.Optimizer:
    """Return torch's Adam with `momentum` as beta1 and 0.999 as beta2, with one fused kernel for all tensors."""
    return torch.optim.Adam(parameters, lr=lr, betas=(momentum, 0.999), fused=True)
