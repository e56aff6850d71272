"""Trainers that do the worst to the process in which they run, named by jobs as "user_processes:hangs"."""

import ctypes
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedring.offers import offers
from tests.fault.user_trainers import _wait_at_gate


@offers("trainer")
def hangs(model: nn.Module, samples: Any, plan: Any) -> int:
    """Compute for ever, and let no other thread of the process do anything."""
    while True:
        pass


@offers("trainer")
def crashes(model: nn.Module, samples: Any, plan: Any) -> int:
    """Read what is not there."""
    return ctypes.string_at(0)[0]


@offers("trainer")
def leaves(model: nn.Module, samples: Any, plan: Any) -> int:
    """End the process without a word."""
    os._exit(3)


@offers("trainer")
def grows(model: nn.Module, samples: Any, plan: Any) -> int:
    """Take memory without end."""
    taken = []
    while True:
        taken.append(torch.ones(1 << 22))


@offers("optimizer")
def gated(parameters: Any, lr: float, momentum: float) -> torch.optim.Optimizer:
    """An optimizer whose steps wait at the gate, if there is one."""
    return Gated(parameters, lr)


class Gated(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        if (gate := os.environ.get("FL_TEST_GATE")) and Path(gate).exists():
            _wait_at_gate()
        return super().step(closure)


@offers("data")
def hanging_data(root: Path | None, download: bool) -> Any:
    """Data that never come."""
    while True:
        pass


@offers("evaluator")
def crashing_evaluator(model: nn.Module, samples: Any) -> Any:
    """Read what is not there."""
    return ctypes.string_at(0)
