"""Functions and classes that tests call at other ranks."""

import random
import subprocess
import threading
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fedring import remote
from fedring.offers import offers


@offers("remote")
def echo(*args: Any, **kwargs: Any) -> Any:
    return [args, kwargs]


@offers("remote")
def keywords(x: Any, *, method: str, function: str, self: str) -> Any:
    return [x, method, function, self]


def unmarked() -> None:
    """Not to be called from elsewhere."""


run_anything = partial(subprocess.run)
random_bytes = random.getrandbits  # a method of an object, which does not say its module


@offers("remote")
def fail(text: str) -> None:
    raise ArithmeticError(text)


class OddReason(ArithmeticError):
    reason = "größe"


class NoText(ArithmeticError):
    def __str__(self) -> str:
        raise KeyError("no text")


@offers("remote")
def fail_with(kind: str) -> None:
    raise {"OddReason": OddReason, "NoText": NoText}[kind]("odd")


@offers("remote")
def random_tensor(seed: int) -> Tensor:
    return torch.rand(3, 3, generator=torch.Generator().manual_seed(seed)).requires_grad_()


@offers("remote")
def wait_for(name: str) -> str:
    assert EVENTS[name].wait(60)
    return name


EVENTS: dict[str, threading.Event] = {}
KEPT: dict[str, Any] = {}


@offers("remote")
def keep(name: str, value: Any) -> None:
    KEPT[name] = value


@offers("remote")
def fetch_kept(name: str) -> Any:
    handed = KEPT[name]["handed"][0]
    return handed.fetch() if isinstance(handed, remote.Reference) else handed


@offers("remote")
def fetch(reference: remote.Reference) -> Any:
    return reference.fetch()


@offers("remote")
def apply(layer: remote.Reference, x: Tensor) -> Any:
    return layer(x)


@offers("remote")
class Scaled(nn.Module):
    """A layer whose weights follow from a seed."""

    def __init__(self, seed: int, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))

    @offers("remote")
    def scaled(self, x: Tensor, by: float) -> Tensor:
        result: Tensor = by * self(x)
        return result

    @offers("remote")
    def named(self, x: Tensor, *, method: str) -> tuple[Tensor, str]:
        return self(x), method

    def unmarked(self) -> None:
        """Not to be called from elsewhere."""

    def _hidden(self) -> None:
        """Not to be called from elsewhere."""


class Through(nn.Module):
    """A module whose forward passes through a module of another owner."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own = own
        self.next: remote.Reference | None = None

    def forward(self, x: Tensor) -> Tensor:
        assert self.next is not None
        result: Tensor = self.own(self.next(self.own(x)))
        return result


@offers("remote")
def late_square(x: Any, event: str = "") -> Any:
    """Square a tensor, or those in a list, once an event has happened."""
    if event:
        wait_for(event)
    return [one * one for one in x] if isinstance(x, list) else x * x
