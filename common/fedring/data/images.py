"""Data sets of small images, held in memory.

They are scikit-learn's digits, which come with fedring, and three of torchvision. The digits are the test part of
"Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak, 1998, UCI Machine Learning Repository, CC BY
4.0): 1,797 images of 8 by 8 pixels with values from 0 to 16.
"""

from collections.abc import Sequence
from importlib.resources import as_file, files
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedring import vision
from fedring.data.samples import DataError, Samples, Scale, Split
from fedring.offers import offers

_DIGITS_SEED = 0
_DIGITS_FOLDS = 5  # one sample in five is a test sample
_FOLDERS = {"MNIST": "MNIST/raw", "FashionMNIST": "FashionMNIST/raw", "CIFAR10": "cifar-10-batches-py"}


@offers("data")
def digits(root: Path | None = None, download: bool = False) -> Split:
    """Return the digits: 1,437 training and 360 test samples in 10 classes.

    Args:
        root: Unused: the images are part of fedring.
        download: Unused.

    Returns:
        Inputs [n, 1, 8, 8] float32 with mean 0 and standard deviation 1, and labels [n] int64.
    """
    with as_file(files("fedring.data") / "digits.npz") as path, np.load(path, allow_pickle=False) as archive:
        values, labels = archive["images"], archive["labels"]
    inputs = torch.from_numpy(values.astype(np.float32)).view(-1, 1, 8, 8)
    inputs = (inputs - inputs.mean()) / inputs.std()
    everything = Samples(inputs, torch.from_numpy(labels.astype(np.int64)))
    # Taking every fifth sample of a list sorted by class gives each class its share of test samples.
    order = np.random.RandomState(_DIGITS_SEED).permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    is_test = np.zeros(len(labels), bool)
    is_test[order[::_DIGITS_FOLDS]] = True
    return Split(everything.subset(np.flatnonzero(~is_test)), everything.subset(np.flatnonzero(is_test)), classes=10)


@offers("data")
def mnist(root: Path | None, download: bool = False) -> Split:
    """Return MNIST: 60,000 training and 10,000 test samples in 10 classes.

    Args:
        root: The folder that holds torchvision's files of the data set.
        download: Whether to download files that are missing.

    Returns:
        Inputs [n, 1, 28, 28], stored as uint8 and scaled to float32 as batches are taken, and labels [n] int64.

    Raises:
        DataError: With the reason no_data, if `root` is None or does not hold the data set, or a download failed.
    """
    return _load("MNIST", root, download, _scale([0.1307], [0.3081]))


@offers("data")
def fashion_mnist(root: Path | None, download: bool = False) -> Split:
    """Return Fashion-MNIST, which has the shape and size of MNIST; see `mnist`."""
    return _load("FashionMNIST", root, download, _scale([0.2860], [0.3530]))


@offers("data")
def cifar10(root: Path | None, download: bool = False) -> Split:
    """Return CIFAR-10, [3, 32, 32] in 10 classes; see `mnist`.

    It has 50,000 training and 10,000 test samples.
    """
    return _load("CIFAR10", root, download, _scale([0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]))


FROM_FOLDER = (mnist, fashion_mnist, cifar10)
"""The callables that need a folder; without one they raise DataError before they load anything."""


def _scale(mean: Sequence[float], std: Sequence[float]) -> Scale:
    """Return the scale for bytes from 0 to 255.

    `mean` and `std` are those of values from 0 to 1, by channel.
    """
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
            advice = f"the download failed ({error}); check the network and the free space on the disk"
        raise DataError("no_data", f"There is no complete {name} in {root}: {advice}.") from error
    return Samples(_channels_first(torch.as_tensor(dataset.data)), torch.as_tensor(np.asarray(dataset.targets)), scale)


def _channels_first(images: Tensor) -> Tensor:
    """Return uint8 images as [n, channels, height, width].

    The images are [n, height, width] or [n, height, width, channels].
    """
    return images.unsqueeze(1) if images.ndim == 3 else images.permute(0, 3, 1, 2).contiguous()
