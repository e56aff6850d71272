"""Models of a user, which jobs name as "user_models:normed" and so on."""

import os

import torch
from torch import Tensor, nn

from fedring.offers import offers


class Normed(nn.Module):
    """A model with buffers of both kinds: BatchNorm's means and its integer count."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(64, width)
        self.norm = nn.BatchNorm1d(width)
        self.second = nn.Linear(width, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits [batch, 10] of digits [batch, 1, 8, 8]."""
        logits: Tensor = self.second(torch.relu(self.norm(self.first(inputs.flatten(1)))))
        return logits


@offers("model")
def normed(width: int = 256) -> nn.Module:
    """Build a model with buffers."""
    return Normed(width)


class Untraceable(nn.Module):
    """A model whose forward depends on values, so that it cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 32), nn.Linear(32, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits [batch, 10] of digits [batch, 1, 8, 8]."""
        hidden = self.first(inputs.flatten(1))
        logits: Tensor = self.second(hidden if hidden.sum() > 0 else -hidden)
        return logits


class Tied(nn.Module):
    """A model whose first and last layer share their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.last.weight = self.first.weight

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits [batch, 64] of digits [batch, 1, 8, 8]."""
        logits: Tensor = self.last(self.middle(self.first(inputs.flatten(1))))
        return logits


@offers("model")
def untraceable() -> nn.Module:
    """Build a model that cannot be traced."""
    return Untraceable()


@offers("model")
def tied() -> nn.Module:
    """Build a model with tied weights."""
    return Tied()


@offers("model")
def frozen_body() -> nn.Module:
    """Build a model of which only the last layer is trained."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model[1].requires_grad_(False)
    return model


@offers("model")
def based(value: float = 0.0) -> nn.Module:
    """Build a model with one frozen tensor, which has this value."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    model.register_parameter("base", nn.Parameter(torch.tensor(value), requires_grad=False))
    return model


@offers("model")
def own_base() -> nn.Module:
    """Build a model whose frozen tensor differs in each process."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    model.register_parameter("base", nn.Parameter(torch.tensor(float(os.getpid())), requires_grad=False))
    return model


@offers("cut")
def halves(model: nn.Sequential) -> list[nn.Module]:
    """Cut the model into two stages."""
    return [model[:4], model[4:]]
