"""The handwritten digits of scikit-learn, embedded: a data set that is always there.

They are the test part of "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak, 1998, UCI Machine
Learning Repository, CC BY 4.0): 1,797 images of 8 by 8 pixels with values from 0 to 16.
"""

from importlib.resources import as_file, files
from pathlib import Path

import numpy as np
import torch

from fedring.data.samples import Samples, Split

_SEED = 0
_FOLDS = 5  # one sample in five is a test sample


def digits(root: Path | None = None, download: bool = False) -> Split:
    """1,437 training and 360 test samples, [1, 8, 8] float32 with mean 0 and deviation 1; needs no `root`."""
    with as_file(files("fedring.data") / "digits.npz") as path, np.load(path, allow_pickle=False) as archive:
        values, labels = archive["images"], archive["labels"]
    inputs = torch.from_numpy(values.astype(np.float32)).view(-1, 1, 8, 8)
    inputs = (inputs - inputs.mean()) / inputs.std()
    everything = Samples(inputs, torch.from_numpy(labels.astype(np.int64)))
    # Every fifth sample of a list sorted by class: each class gives a fifth of its own.
    order = np.random.RandomState(_SEED).permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    is_test = np.zeros(len(labels), bool)
    is_test[order[::_FOLDS]] = True
    return Split(everything.subset(np.flatnonzero(~is_test)), everything.subset(np.flatnonzero(is_test)), classes=10)
