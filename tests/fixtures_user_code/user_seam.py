"""What a user's own module might hold."""

from typing import Any

from torch import nn

from fedring.offers import offers


@offers("model")
def linear(inputs: int = 4, outputs: int = 3) -> nn.Module:
    """A model."""
    return nn.Linear(inputs, outputs)


@offers("model")
def not_a_model() -> int:
    """Something else."""
    return 3


def one_step(model: nn.Module, samples: Any, plan: Any) -> int:
    """A trainer."""
    for parameter in model.parameters():
        parameter.data.fill_(plan.lr)
    return len(samples)


@offers("model")
def exits() -> nn.Module:
    """End the process."""
    raise SystemExit(3)


@offers("optimizer")
def my_optimizer(parameters: object, lr: float, momentum: float, *, own: int) -> int:
    return own
