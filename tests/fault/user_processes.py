"""Trainers that do the worst to the process in which they run, named by jobs as "user_processes:hangs"."""

import ctypes
import json
import os
import signal
import struct
import sys
from functools import partialmethod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedring.client.training.frames import CodePipe
from fedring.data import digits
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


@offers("data")
def announcing_data(root: Path | None, download: bool) -> Any:
    """Announce to fl-client tensors of one byte more than 2 GiB, in the place of data."""
    os.write(int(sys.argv[1]), struct.pack("<QQ", 2, (2 << 30) + 1) + b"{}")
    return digits(root, download)


@offers("optimizer")
def killed(parameters: Any, lr: float, momentum: float, moment: str) -> torch.optim.Optimizer:
    """An optimizer whose process is killed at a moment, once after each time that the test makes its file."""
    return Killed(parameters, lr, moment)


class Killed(torch.optim.SGD):
    def __init__(self, parameters: Any, lr: float, moment: str) -> None:
        super().__init__(parameters, lr)
        self._moment, self._steps = moment, 0
        CodePipe.send = partialmethod(_send_at, moment)  # type: ignore[method-assign, assignment]

    def step(self, closure: Any = None) -> Any:
        if (self._moment, self._steps) in (("first", 0), ("middle", 2)):
            _end_once()
        self._steps += 1
        return super().step(closure)


_SEND = CodePipe.send


def _send_at(pipe: CodePipe, moment: str, message: Any, values: bytes = b"") -> None:
    """Send a message, and end if it is the result of a training, and the moment has come."""
    if moment == "sending" and "num_samples" in message and Path(os.environ["FL_TEST_KILL"]).exists():
        text = json.dumps(message).encode()
        os.write(pipe.fileno(), struct.pack("<QQ", len(text), len(values)) + text + values[: len(values) // 2])
        _end_once()
    _SEND(pipe, message, values)
    if moment == "sent" and "num_samples" in message:
        _end_once()


def _end_once() -> None:
    if (file := Path(os.environ["FL_TEST_KILL"])).exists():
        file.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


@offers("evaluator")
def crashing_evaluator(model: nn.Module, samples: Any) -> Any:
    """Read what is not there."""
    return ctypes.string_at(0)
