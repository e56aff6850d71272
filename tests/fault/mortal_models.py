"""Models for the fault tests of groups, named by jobs as "mortal_models:net"."""

import os
import time
from pathlib import Path

from torch import Tensor, nn


class Fate(nn.Module):
    """Passes its input on, but gets a signal in one training step, where FL_TEST_FATE says so.

    FL_TEST_FATE is "SIGNAL STEP WAY PIPE"; WAY is forward, or backward: when a part of the gradients is on its way
    already. Just before it happens, the pipe tells when that is, once it is read.
    """

    def __init__(self) -> None:
        super().__init__()
        self._passes = 0

    def forward(self, inputs: Tensor) -> Tensor:
        """`inputs`, of any shape."""
        self._passes += self.training
        number, step, way, path = os.environ.get("FL_TEST_FATE", "0 0 - -").split(" ")
        if self.training and self._passes == int(step):
            if way == "backward":
                inputs.register_hook(lambda gradient: _meet(int(number), Path(path)))  # type: ignore[no-untyped-call]
            else:
                _meet(int(number), Path(path))
        return inputs


def _meet(number: int, path: Path) -> None:
    if path.exists():  # a stage that is cut anew counts its passes from one again
        path.write_text(str(time.monotonic()))
        path.unlink()
        os.kill(os.getpid(), number)


def net() -> nn.Module:
    """A small network for the 8 x 8 digits, with buffers."""
    hidden = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU())
    return nn.Sequential(hidden, Fate(), nn.Linear(32, 10))


def stages() -> nn.Module:
    """A small network for the 8 x 8 digits, any third of which can be a stage that dies."""
    thirds = [(nn.Linear(width, 32), Fate(), nn.ReLU()) for width in (64, 32, 32)]
    return nn.Sequential(nn.Flatten(), *(layer for third in thirds for layer in third), nn.Linear(32, 10))
