"""Models to start with; each callable can be named in a job."""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional


def mnist_cnn() -> nn.Module:
    """The small network of the MNIST benchmarks, for [1, 28, 28]; 1,199,882 parameters."""
    return _MnistCnn()


def digits_mlp(hidden: int = 64, layers: int = 1) -> nn.Module:
    """Hidden layers for the 8 x 8 digits."""
    widths = [64, *[hidden] * layers]
    parts = [part for first, second in pairwise(widths) for part in (nn.Linear(first, second), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *parts, nn.Linear(widths[-1], 10))


def cifar_cnn() -> nn.Module:
    """Three convolutions and two layers for [3, 32, 32]; 356,810 parameters."""
    return nn.Sequential(
        *_block(3, 32),
        *_block(32, 64),
        *_block(64, 128),
        nn.Flatten(),
        nn.Linear(2048, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def vector(size: int) -> nn.Module:
    """One parameter of `size` zeros: for measuring transport."""
    model = nn.Module()
    model.register_parameter("values", nn.Parameter(torch.zeros(size)))
    return model


class _MnistCnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits [batch, 10] of `inputs` [batch, 1, 28, 28]."""
        hidden = self.conv2(functional.relu(self.conv1(inputs)))
        # max(relu(x)) = relu(max(x)), on a quarter of the values; pooling is several times faster in this layout.
        hidden = functional.max_pool2d(hidden.contiguous(memory_format=torch.channels_last), 2)
        hidden = functional.relu(self.fc1(functional.relu(hidden).flatten(1)))
        logits: Tensor = self.fc2(hidden)
        return logits


def _block(channels: int, features: int) -> list[nn.Module]:
    return [nn.Conv2d(channels, features, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
