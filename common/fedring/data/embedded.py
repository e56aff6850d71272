"""The handwritten digits that come with scikit-learn: a data set that is always there."""

from pathlib import Path

import numpy as np
import torch

from fedring.data.samples import Samples, Split

_SEED = 0
_FOLDS = 5  # one sample in five is a test sample


def digits(root: Path | None = None, download: bool = False) -> Split:
    """1,437 training and 360 test samples, [1, 8, 8] float32 with mean 0 and deviation 1; needs no `root`."""
    from sklearn.datasets import load_digits  # takes a second to import: only those who use it pay

    values, labels = load_digits(return_X_y=True)
    inputs = torch.from_numpy(values.astype(np.float32)).view(-1, 1, 8, 8)
    inputs = (inputs - inputs.mean()) / inputs.std()
    everything = Samples(inputs, torch.from_numpy(labels.astype(np.int64)))
    # Every fifth sample of a list sorted by class: each class gives a fifth of its own.
    order = np.random.RandomState(_SEED).permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    is_test = np.zeros(len(labels), bool)
    is_test[order[::_FOLDS]] = True
    return Split(everything.subset(np.flatnonzero(~is_test)), everything.subset(np.flatnonzero(is_test)), classes=10)
