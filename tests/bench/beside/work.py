"""The work of one client, the same for each system: for any environment with torch and numpy.

The cell `mnist` trains a CNN of 1,199,882 parameters for one epoch of 6,000 samples, in batches of 64. The cell `echo`
changes one value of a model of 25,000,000 parameters (100 MB), and `small` one of 10,000.
"""

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

CELLS = ("mnist", "echo", "small")
PARAMETERS = {"echo": 25_000_000, "small": 10_000}
_SUBSET, _BATCH, _LR, _MOMENTUM = 6000, 64, 0.05, 0.9


class Cnn(nn.Module):
    """The network of the cell `mnist`, as fedring.train.models has it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits [batch, 10] of `inputs` [batch, 1, 28, 28]."""
        hidden = self.conv2(functional.relu(self.conv1(inputs)))
        hidden = functional.max_pool2d(hidden.contiguous(memory_format=torch.channels_last), 2)
        hidden = functional.relu(self.fc1(functional.relu(hidden).flatten(1)))
        logits: torch.Tensor = self.fc2(hidden)
        return logits


class Vector(nn.Module):
    """A model that is one vector of random values, since Flower compresses what it sends."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size  # NVFlare reads it, to build the model elsewhere
        self.values = nn.Parameter(torch.randn(size))


def network(cell: str) -> nn.Module:
    """Return the model of a cell."""
    torch.manual_seed(0)
    return Cnn() if cell == "mnist" else Vector(PARAMETERS[cell])


def images(root: str, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return MNIST's images [n, 1, 28, 28] of bytes and labels [n]; `kind` is train or t10k. Nothing is copied."""
    raw = Path(root) / "MNIST" / "raw"
    pixels = np.memmap(raw / f"{kind}-images-idx3-ubyte", np.uint8, "c", 16).reshape(-1, 1, 28, 28)
    labels = np.memmap(raw / f"{kind}-labels-idx1-ubyte", np.uint8, "c", 8)
    return torch.from_numpy(pixels), torch.from_numpy(labels)


def train(cell: str, model: nn.Module, root: str, part: int, parts: int, number: int) -> tuple[int, float]:
    """Train the model, and return the number of samples and the seconds.

    Args:
        cell: Of the benchmark.
        model: Which is changed.
        root: Folder of MNIST.
        part: Of the client, from 0.
        parts: How many clients there are.
        number: Of the round.
    """
    if cell != "mnist":
        began = time.perf_counter()
        with torch.no_grad():
            next(model.parameters()).view(-1)[0] += 1.0
        return 1, time.perf_counter() - began
    pixels, labels = images(root, "train")
    drawn = torch.from_numpy(np.random.default_rng([part, number]).permutation(len(labels) // parts)[:_SUBSET])
    drawn = drawn * parts + part
    began = time.perf_counter()
    optimizer = torch.optim.SGD(model.parameters(), lr=_LR, momentum=_MOMENTUM)
    for batch in torch.split(drawn, _BATCH):
        inputs = (pixels[batch].float() / 255 - 0.1307) / 0.3081
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), labels[batch].long()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return _SUBSET, time.perf_counter() - began


def accuracy(state: dict[str, Any], root: str) -> float:
    """Return the share of MNIST's test samples that the CNN with this state gets right."""
    model = Cnn()
    model.load_state_dict({name: torch.as_tensor(np.asarray(value)) for name, value in state.items()})
    pixels, labels = images(root, "t10k")
    right = 0
    with torch.no_grad():
        for inputs, wanted in zip(torch.split(pixels, 1000), torch.split(labels, 1000), strict=True):
            right += int((model((inputs.float() / 255 - 0.1307) / 0.3081).argmax(1) == wanted).sum())
    return right / len(labels)
