"""Models that come with fedring; a job can name each of them."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedring.offers import offers
from fedring.train.tensors.arrays import module_of_shapes

_MOST_LAYERS = 1000


@offers("model")
def mnist_cnn() -> nn.Module:
    """Return the convolutional network of the MNIST benchmarks.

    It maps [batch, 1, 28, 28] to logits [batch, 10], and has 1,199,882 parameters.
    """
    return _MnistCnn()


@offers("model")
def mnist_tanh_cnn() -> nn.Module:
    """Return a small network for MNIST with bounded activations.

    DP-SGD trains it well (Papernot et al. 2021). It maps [batch, 1, 28, 28] to logits [batch, 10], and has 26,010
    parameters.
    """
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, padding=2),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, 2),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.Tanh(),
        nn.Linear(32, 10),
    )


@offers("model")
def digits_mlp(hidden: int = 64, layers: int = 1) -> nn.Module:
    """Return a perceptron for the digits.

    It maps [batch, 1, 8, 8] to logits [batch, 10].

    Args:
        hidden: The width of each hidden layer.
        layers: The number of hidden layers.
    """
    if not 0 <= layers <= _MOST_LAYERS:
        raise ValueError(f"layers must be from 0 to {_MOST_LAYERS}, and is {layers}")
    widths = [64, *[hidden] * layers]
    parts = [part for first, second in pairwise(widths) for part in (nn.Linear(first, second), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *parts, nn.Linear(widths[-1], 10))


@offers("model")
def cifar_cnn() -> nn.Module:
    """Return a small network for CIFAR-10: three convolutions and two linear layers.

    It maps [batch, 3, 32, 32] to logits [batch, 10], and has 356,810 parameters.
    """
    return nn.Sequential(
        *_block(3, 32),
        *_block(32, 64),
        *_block(64, 128),
        nn.Flatten(),
        nn.Linear(2048, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


@offers("model")
def vector(size: int) -> nn.Module:
    """Return a module with one parameter of `size` zeros.

    It has no forward, and serves measurements of transport.
    """
    model = nn.Module()
    model.register_parameter("values", nn.Parameter(torch.zeros(size)))
    return model


@offers("model")
def arrays(shapes: Mapping[str, Sequence[int]]) -> nn.Module:
    """Return a module without forward, for models of numpy arrays.

    docs/clients.md describes such clients.

    Args:
        shapes: The shape of each array by its name, in order. They are float32 parameters, and all zeros at first.
    """
    return module_of_shapes(shapes)


class _MnistCnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits [batch, 10] of `inputs` [batch, 1, 28, 28]."""
        hidden = self.conv2(functional.relu(self.conv1(inputs)))
        # Because max(relu(x)) = relu(max(x)), relu can follow, on a quarter of the values. Pooling is several times
        # faster in this memory format.
        hidden = functional.max_pool2d(hidden.contiguous(memory_format=torch.channels_last), 2)
        hidden = functional.relu(self.fc1(functional.relu(hidden).flatten(1)))
        logits: Tensor = self.fc2(hidden)
        return logits


def _block(channels: int, features: int) -> list[nn.Module]:
    return [nn.Conv2d(channels, features, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
