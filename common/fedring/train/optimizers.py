"""Optimizers that come with fedring.

A job can name each of them, and gives further arguments in `optimizer_args`.
"""

from collections.abc import Iterable

import torch
from torch import nn

from fedring.offers import offers


@offers("optimizer")
def sgd(
    parameters: Iterable[nn.Parameter],
    lr: float,
    momentum: float,
    *,
    weight_decay: float = 0.0,
    dampening: float = 0.0,
    nesterov: bool = False,
) -> torch.optim.Optimizer:
    """Return torch's stochastic gradient descent, with one fused kernel for all tensors."""
    return torch.optim.SGD(
        parameters,
        lr=lr,
        momentum=momentum,
        weight_decay=weight_decay,
        dampening=dampening,
        nesterov=nesterov,
        fused=True,
    )


@offers("optimizer")
def adam(
    parameters: Iterable[nn.Parameter],
    lr: float,
    momentum: float,
    *,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
) -> torch.optim.Optimizer:
    """Return torch's Adam with `momentum` as beta1.

    It has one fused kernel for all tensors.
    """
    return torch.optim.Adam(
        parameters, lr=lr, betas=(momentum, beta2), eps=eps, weight_decay=weight_decay, amsgrad=amsgrad, fused=True
    )
