"""A rule of a user that burns a core of the server."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedring.offers import offers

Float64 = NDArray[np.float64]


@offers("rule")
class Burns:
    """The mean, which begins by computing in vain until a file is there.

    Args:
        until: The file.
    """

    def __init__(self, until: Path) -> None:
        self.until = until

    def combine(self, deltas: Float64, weights: Float64) -> Float64:
        """Return the mean."""
        while not self.until.exists():
            sum(range(10_000))
        return weights @ deltas
