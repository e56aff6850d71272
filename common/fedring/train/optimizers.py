"""Optimizers to start with; each callable can be named in a job."""

from collections.abc import Iterable

import torch
from torch import nn


def sgd(parameters: Iterable[nn.Parameter], lr: float, momentum: float) -> torch.optim.Optimizer:
    """Stochastic gradient descent, one kernel for all tensors."""
    return torch.optim.SGD(parameters, lr=lr, momentum=momentum, fused=True)


def adam(parameters: Iterable[nn.Parameter], lr: float, momentum: float) -> torch.optim.Optimizer:
    """Adam with `momentum` as its beta1, one kernel for all tensors."""
    return torch.optim.Adam(parameters, lr=lr, betas=(momentum, 0.999), fused=True)
