"""The image data sets that torchvision reads, as bytes in memory."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedring import vision
from fedring.data.errors import DataError
from fedring.data.samples import Samples, Scale, Split

_FOLDERS = {"MNIST": "MNIST/raw", "FashionMNIST": "FashionMNIST/raw", "CIFAR10": "cifar-10-batches-py"}


def mnist(root: Path | None, download: bool = False) -> Split:
    """60,000 training and 10,000 test samples of [1, 28, 28] in 10 classes."""
    return _load("MNIST", root, download, _scale([0.1307], [0.3081]))


def fashion_mnist(root: Path | None, download: bool = False) -> Split:
    """60,000 training and 10,000 test samples of [1, 28, 28] in 10 classes."""
    return _load("FashionMNIST", root, download, _scale([0.2860], [0.3530]))


def cifar10(root: Path | None, download: bool = False) -> Split:
    """50,000 training and 10,000 test samples of [3, 32, 32] in 10 classes."""
    return _load("CIFAR10", root, download, _scale([0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]))


FROM_FOLDER = (mnist, fashion_mnist, cifar10)
"""The callables that have no samples, and say so at once, without a folder."""


def _scale(mean: Sequence[float], std: Sequence[float]) -> Scale:
    """The scale of bytes, 0 to 255, whose `mean` and `std` are given for values of 0 to 1."""
    return Scale(255 * torch.tensor(mean).view(-1, 1, 1), 255 * torch.tensor(std).view(-1, 1, 1))


def _load(name: str, root: Path | None, download: bool, scale: Scale) -> Split:
    if root is None:
        raise DataError("no_data", f"{name} is not part of fedring: set data_root to the folder that holds it.")
    train, test = (_read(name, root, download, train, scale) for train in (True, False))
    return Split(train, test, classes=10)


def _read(name: str, root: Path, download: bool, train: bool, scale: Scale) -> Samples:
    vision.load()
    import torchvision.datasets as datasets

    try:
        dataset = getattr(datasets, name)(root, train=train, download=download)
    except (RuntimeError, OSError, ValueError, AssertionError) as error:
        place = Path(root) / _FOLDERS[name]
        advice = f"it belongs in {place}; set data_root to the folder that holds it, or allow download"
        if download:
            advice = f"its download failed ({error}): check the network and the space on the disk"
        raise DataError("no_data", f"There is no complete {name} in {root}: {advice}.") from error
    return Samples(_channels_first(torch.as_tensor(dataset.data)), torch.as_tensor(np.asarray(dataset.targets)), scale)


def _channels_first(images: Tensor) -> Tensor:
    """[n, channels, height, width] uint8 from [n, height, width] or [n, height, width, channels]."""
    return images.unsqueeze(1) if images.ndim == 3 else images.permute(0, 3, 1, 2).contiguous()
