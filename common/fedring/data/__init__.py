"""Samples: where they come from, and how they are divided among clients.

A data callable is called with the client's data folder (or None) and whether it may download, and returns a Split.
"""

from fedring.data.embedded import digits
from fedring.data.errors import DataError
from fedring.data.images import cifar10, fashion_mnist, mnist
from fedring.data.partition import load_part
from fedring.data.samples import Samples, Scale, Split

__all__ = [
    "DataError",
    "Samples",
    "Scale",
    "Split",
    "cifar10",
    "digits",
    "fashion_mnist",
    "load_part",
    "mnist",
]
