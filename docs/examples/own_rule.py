"""An aggregation rule of your own: the mean of the updates that point where most of the others point."""

import numpy as np
from numpy.typing import NDArray

from fedring.offers import offers


@offers("rule")
class Agreement:
    """A rule for `[aggregation] rule = "own_rule:Agreement"`; `args = { least = 0.1 }` sets the least cosine."""

    def __init__(self, least: float = 0.0) -> None:
        self.least = least

    def coefficients(self, gram: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return what each update counts, from the inner products [n, n] of all updates and from their weights [n]."""
        norms = np.sqrt(np.diag(gram))
        cosines = gram / np.maximum(np.outer(norms, norms), 1e-30)
        agreeing = weights * (np.median(cosines, axis=1) >= self.least)
        return np.asarray(agreeing / agreeing.sum())
