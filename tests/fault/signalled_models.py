"""Models of which a test can send a signal to their process in one training pass; jobs name "signalled_models:net"."""

import os
import time
from pathlib import Path

from torch import Tensor, nn

from fedring.offers import offers


class SignalAtPass(nn.Module):
    """Passes its input on, but sends a signal to its own process in the training pass that FL_TEST_SIGNAL names.

    FL_TEST_SIGNAL is "SIGNAL PASS DIRECTION PIPE". DIRECTION is "forward" or "backward"; in a backward pass, some of
    the gradients are being sent already. Just before the signal, the time is written to the named pipe, which blocks
    until the test reads it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._passes = 0

    def forward(self, inputs: Tensor) -> Tensor:
        """Return `inputs`, of any shape."""
        self._passes += self.training
        number, step, direction, path = os.environ.get("FL_TEST_SIGNAL", "0 0 - -").split(" ")
        if self.training and self._passes == int(step):
            if direction == "backward":
                inputs.register_hook(lambda gradient: _send_signal(int(number), Path(path)))  # type: ignore[no-untyped-call]
            else:
                _send_signal(int(number), Path(path))
        return inputs


def _send_signal(number: int, pipe: Path) -> None:
    if pipe.exists():  # a stage that is cut anew counts its passes from one again
        pipe.write_text(str(time.monotonic()))
        pipe.unlink()
        os.kill(os.getpid(), number)


@offers("model")
def net() -> nn.Module:
    """Build a small network for the 8 x 8 digits, with buffers."""
    hidden = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU())
    return nn.Sequential(hidden, SignalAtPass(), nn.Linear(32, 10))


@offers("model")
def dropout_net(hidden: int = 32) -> nn.Module:
    """Build a network for the 8 x 8 digits, with random numbers in each step."""
    layers = nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Dropout(0.3))
    return nn.Sequential(layers, SignalAtPass(), nn.Linear(hidden, 10))


@offers("model")
def stages() -> nn.Module:
    """Build a small network for the 8 x 8 digits; any third of it can be the stage whose process gets the signal."""
    thirds = [(nn.Linear(width, 32), SignalAtPass(), nn.ReLU()) for width in (64, 32, 32)]
    return nn.Sequential(nn.Flatten(), *(layer for third in thirds for layer in third), nn.Linear(32, 10))
