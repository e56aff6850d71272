"""What a user's own module might hold."""

from subprocess import run as run  # imported for the module's own use, and not for a job
from typing import Any

from torch import Tensor, nn


def linear(inputs: int = 4, outputs: int = 3) -> nn.Module:
    """A model."""
    return nn.Linear(inputs, outputs)


def not_a_model() -> int:
    """Something else."""
    return 3


def squared(outputs: Tensor, labels: Tensor) -> Tensor:
    """A loss."""
    return (outputs.squeeze(1) - labels).square().mean()


def one_step(model: nn.Module, samples: Any, plan: Any) -> int:
    """A trainer."""
    for parameter in model.parameters():
        parameter.data.fill_(plan.lr)
    return len(samples)


_private = linear


def my_optimizer(parameters: object, lr: float, momentum: float, *, own: int) -> int:
    return own
