"""Samples: where they come from, and how they are divided among clients.

The package holds labelled samples in memory, the data sets that a job can name, and the division of a data set into one
part for each client. It imports torch, numpy and `fedring.vision`, and nothing of jobs, training or the network. A data
callable of a job takes the client's data folder (or None) and whether it may download, and returns a `Split`.
"""

from fedring.data.images import cifar10, digits, fashion_mnist, mnist
from fedring.data.partition import load_part
from fedring.data.samples import DataError, Samples, Scale, Split, load_split

__all__ = [
    "DataError",
    "Samples",
    "Scale",
    "Split",
    "cifar10",
    "digits",
    "fashion_mnist",
    "load_part",
    "load_split",
    "mnist",
]
