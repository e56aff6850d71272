"""Rules of a user that fail, and samples that do not load."""

from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from fedring.offers import offers

Float64 = NDArray[np.float64]


@offers("rule")
class NotANumber:
    """A rule that returns NaN."""

    def combine(self, deltas: Float64, weights: Float64) -> Float64:
        """Return no number."""
        return np.full(deltas.shape[1], np.nan)


@offers("rule")
class Raises:
    """A rule that raises an error."""

    def coefficients(self, gram: Float64, weights: Float64) -> Float64:
        """Raise an error."""
        raise ZeroDivisionError("nothing agrees")


@offers("data")
def unreadable(root: Path | None, download: bool) -> NoReturn:
    """Raise an error."""
    raise OSError("the disk is not mounted")
