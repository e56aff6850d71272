"""Samples: their sources, and their division among clients.

The package holds labelled samples in memory, the data sets that a job can name, and the division of a data set into one
part for each client. It may import `fedring.vision`. Jobs, training and the network have no place here. A data callable
of a job takes the client's data folder (or None) and whether it may download, and returns a `Split`. If it
declares the parameter `part`, it also takes a `ClientPart`.
"""

from fedring.data.images import cifar10, digits, fashion_mnist, mnist
from fedring.data.partition import load_part
from fedring.data.samples import ClientPart, DataError, Samples, Scale, Split, load_split, takes_part

__all__ = [
    "ClientPart",
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
    "takes_part",
]
