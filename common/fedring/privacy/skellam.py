"""Noise of the Skellam distribution.

It is the distribution of the difference of two independent Poisson variables with the same mean. Sums of it are of the
same distribution, with the sum of the variances, as distributed differential privacy needs it (Agarwal, Kairouz, Liu
2021). The distribution with the variance v takes the value k with the probability exp(-v) I_k(v), where I_k is the
modified Bessel function of the first kind.

Values are drawn by inversion: a number of 128 random bits is looked up in a table of the cumulative distribution, which
is computed with integers, each entry to within 2^-128. Values that are drawn with a probability below 2^-160 are left
out. The total variation distance between the drawn values and the Skellam distribution is below 2^-106: for a vector of
2^25 values, it is below 2^-81, far less than any delta.
"""

from functools import lru_cache
from itertools import takewhile
from math import asinh, hypot, log

import numpy as np
from numpy.typing import NDArray

from fedring.privacy.keystream import KeyStream

MIN_VARIANCE, MAX_VARIANCE = 2.0**-32, 2.0**32
"""The bounds of the variance. The table of the largest variance has 1.7 million entries."""

_HALF = 64
_BITS = 2 * _HALF
_GUIDE_BITS = 20
_PRECISION = 160
"""The bits of the smallest number of the recurrence, so that 2^21 roundings change none by more than 2^-139 of it."""


class SkellamNoise:
    """An endless sequence of independent Skellam values with mean 0.

    Args:
        variance: from `MIN_VARIANCE` to `MAX_VARIANCE`.
        high: draws the upper 64 bits of each number that is looked up.
        low: draws the lower 64 bits, which are needed once in about 2^64 / (length of the table) values.
    """

    def __init__(self, variance: float, high: KeyStream, low: KeyStream) -> None:
        if not MIN_VARIANCE <= variance <= MAX_VARIANCE:
            raise ValueError(f"a variance of {variance:g} is not from {MIN_VARIANCE:g} to {MAX_VARIANCE:g}")
        self._table = _table(variance)
        self._high, self._low = high, low

    def draw(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the values from `start` to `stop`, [stop - start]."""
        words = self._high.words(start, stop)
        upper, lower, guide = self._table
        first = (words >> np.uint64(_HALF - _GUIDE_BITS)).astype(np.int64)
        places = guide[first].astype(np.int64)
        several = np.flatnonzero(places != guide[first + 1])
        known, places[several] = words[several], np.searchsorted(upper, words[several])
        for place in several[upper[np.minimum(places[several], len(upper) - 1)] == known].tolist():
            ends = int(np.searchsorted(upper, words[place], side="right"))
            second = self._low.words(start + place, start + place + 1)
            places[place] += np.searchsorted(lower[places[place] : ends], second, side="right").item()
        return places - len(upper) // 2


@lru_cache(maxsize=4)
def _table(variance: float) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.int32]]:
    """Return the cumulative distribution in two halves, and a guide.

    Returns:
        The upper and the lower halves of P(X <= k) 2^128 for k from -n to n - 1, [2 n] each, and the guide.

    The guide, [2^_GUIDE_BITS + 1], holds how many of the upper halves are below each number of so many bits. It spares
    most values the search.
    """
    tails = _tails(variance)
    rising = [*reversed(tails), *((1 << _BITS) - tail for tail in tails)]
    low = (1 << _HALF) - 1
    upper = np.array([value >> _HALF for value in rising], np.uint64)
    firsts = np.arange(1 << _GUIDE_BITS, dtype=np.uint64) << np.uint64(_HALF - _GUIDE_BITS)
    guide = np.append(np.searchsorted(upper, firsts), len(upper)).astype(np.int32)
    return upper, np.array([value & low for value in rising], np.uint64), guide


def _tails(variance: float) -> list[int]:
    """Return P(X >= k) 2^128 for k from 1 to n.

    Here n is the largest k for which that is not rounded to 0. I_(k-1) = I_(k+1) + (2 k / v) I_k is stable from large k
    to small ones (Miller's algorithm, which begins as if I_(n+1) were 0). The probabilities of all values together are
    1, which gives the common factor.
    """
    last = _last(variance)
    numerator, denominator = variance.as_integer_ratio()
    above, at, tail = 0, 1 << _PRECISION, 0
    tails = []
    for k in range(last, 0, -1):
        tail += at
        tails.append(tail)
        above, at = at, above + 2 * k * denominator * at // numerator
    whole = at + 2 * tail
    scaled = ((tail << _BITS) // whole for tail in reversed(tails))
    return list(takewhile(bool, scaled))


def _last(variance: float) -> int:
    """Return a k with P(X >= k) < 2^-160, by Chernoff's bound."""
    k, step = 1, 1
    while _log_tail(variance, k) > -_PRECISION * log(2.0):
        k, step = k + step, max(1, k // 64)
    return k


def _log_tail(variance: float, k: int) -> float:
    """Return an upper bound of the logarithm of P(X >= k)."""
    return k * k / (hypot(k, variance) + variance) - k * asinh(k / variance)
