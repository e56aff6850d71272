"""Robust aggregation rules, which bound a minority's effect on the model.

The clients of the minority may send anything. Each update counts once, whatever its number of samples, because a claim
of many samples would itself be an attack.

The distances of a Gram matrix G, ||x_i - x_j||^2 = G_ii + G_jj - 2 G_ij, lose digits where two updates are almost
equal: in float64, distances below about 1e-7 of the norms are rounding errors. The error of a pair depends on this pair
alone, so a client that sends huge values does not blur the distances between the others.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedring.server.aggregation.rule import RuleError
from fedring.train.jobs.aggregation_table import trimmed

Float64 = NDArray[np.float64]

_CLIPPINGS = 3
"""Iterations of centered clipping, each from the centre that the one before has found."""

_TOO_LONG = 3.0
"""Times the median norm: updates that are longer are left out by centered clipping."""

_WEISZFELD = 8
"""Iterations of Weiszfeld's algorithm; Pillutla et al. 2022 use a few."""

_SMOOTHING = 1e-6
"""The least distance that Weiszfeld's algorithm divides by, as a share of the updates' median norm."""

_TINY = 1e-150
"""Replaces a distance of zero in a quotient."""


@dataclass(frozen=True, slots=True)
class CenteredClip:
    """Centered clipping without updates that are far too long.

    Karimireddy et al. 2021, algorithm 2.

    v <- v + 1/n sum_i (x_i - v) min(1, radius / ||x_i - v||), three times. The first centre is the base model, v = 0.

    Clipping alone bounds what one update does, but a boosted one still pulls with all of the radius in each iteration,
    and what it pulls at, such as a backdoor, may be something that no honest update pulls back. So an update that is
    more than _TOO_LONG times as long as the median does not count at all.

    Args:
        radius: the distance to which updates are shortened; None = the median of the updates' norms.
    """

    radius: float | None = None

    def coefficients(self, gram: Float64, weights: Float64) -> Float64:
        """Return the coefficients of the centre after three iterations, [n]."""
        norms = _norms(gram)
        median = float(np.median(norms))
        radius = median if self.radius is None else self.radius
        kept = norms <= _TOO_LONG * median
        count = np.count_nonzero(kept)
        centre = np.zeros(len(gram))
        for _ in range(_CLIPPINGS):
            factors = kept * np.minimum(1.0, radius / np.maximum(_distances(gram, centre), _TINY))
            centre = centre * (1.0 - factors.sum() / count) + factors / count
        return centre


@dataclass(frozen=True, slots=True)
class GeometricMedian:
    """The geometric median by the smoothed Weiszfeld algorithm.

    This is RFA (Pillutla et al. 2022).

    z <- sum_i b_i x_i / sum_i b_i with b_i = 1 / max(nu, ||z - x_i||), eight times. The first z is the mean of the
    updates after each was shortened to the median norm: one update can move the plain mean anywhere, and can lie
    exactly at any point that is known before, such as the base model, from which the algorithm would hardly move.
    """

    def coefficients(self, gram: Float64, weights: Float64) -> Float64:
        """Return the point's coefficients, [n], with the sum 1.

        The point is that after eight iterations.
        """
        norms = _norms(gram)
        median = float(np.median(norms))
        least = max(_SMOOTHING * median, _TINY)
        point = np.minimum(1.0, median / np.maximum(norms, _TINY)) / len(gram)
        for _ in range(_WEISZFELD):
            inverse = 1.0 / np.maximum(_distances(gram, point), least)
            point = inverse / inverse.sum()
        return point


@dataclass(frozen=True, slots=True)
class Krum:
    """Krum and Multi-Krum (Blanchard et al. 2017, section 4).

    They take the updates that have the closest neighbours. The score of an update is the sum of its squared distances
    to the n - f - 2 updates that are closest to it. The update with the lowest score is taken, or the mean of the n - f
    with the lowest scores. Of equal scores, the first in the order of the updates wins.

    Args:
        malicious: f, the number of updates that may be anything; n > 2 f + 2.
        several: whether the mean of n - f updates is taken instead of one.
    """

    malicious: int
    several: bool = False

    def coefficients(self, gram: Float64, weights: Float64) -> Float64:
        """Return 1/m for the m chosen updates, else 0, [n]."""
        count, squares = len(gram), np.diag(gram)
        distances = np.maximum(squares[:, None] + squares[None, :] - 2.0 * gram, 0.0)
        np.fill_diagonal(distances, np.inf)  # an update is no neighbour of its own
        nearest = np.sort(distances, axis=1)[:, : count - self.malicious - 2]
        order = np.argsort(nearest.sum(axis=1), kind="stable")
        taken = order[: count - self.malicious if self.several else 1]
        result = np.zeros(count)
        result[taken] = 1.0 / len(taken)
        return result


@dataclass(frozen=True, slots=True)
class TrimmedMean:
    """The coordinate-wise trimmed mean (Yin et al. 2018, definition 2).

    Args:
        beta: the share of the values that is left out at each end, in [0, 0.5); rounded up to whole values, but of at
            least one or two values the middle stays.
    """

    beta: float

    def combine(self, deltas: Float64, weights: Float64) -> Float64:
        """Return the trimmed mean of each coordinate, [m]."""
        count = len(deltas)
        out = min(trimmed(self.beta, count), (count - 1) // 2)
        return _mean_of_middle(deltas, out)


@dataclass(frozen=True, slots=True)
class Median:
    """The coordinate-wise median (Yin et al. 2018, definition 1).

    It is the mean of the two in the middle if n is even.
    """

    def combine(self, deltas: Float64, weights: Float64) -> Float64:
        """Return the median of each coordinate, [m]."""
        return _mean_of_middle(deltas, (len(deltas) - 1) // 2)


@dataclass(frozen=True, slots=True)
class FLTrust:
    """FLTrust (Cao et al. 2021, algorithm 2).

    Updates count as far as they point where the server's own update does. With the server's update g, the result is
    sum_i t_i (||g|| / ||x_i||) x_i / sum_i t_i, where the trust t_i in an update x_i is the cosine of its angle to g,
    or 0 if that is negative.
    """

    def coefficients(self, gram: Float64, weights: Float64) -> Float64:
        """Return the coefficients of all updates, [n].

        That of the last one, which is the server's own, is 0.

        Raises:
            RuleError: "none_trusted", if no update has a positive cosine.
        """
        norms = np.maximum(_norms(gram), _TINY)
        own = norms[-1]
        trust = np.maximum(gram[-1] / own / norms, 0.0)
        trust[-1] = 0.0
        if not trust.any():
            raise RuleError("none_trusted", "no update points in the direction of the server's own update")
        return np.asarray(trust / trust.sum() * (own / norms))


def _norms(gram: Float64) -> Float64:
    return np.sqrt(np.maximum(np.diag(gram), 0.0))


def _distances(gram: Float64, point: Float64) -> Float64:
    """Return the distance of each update from sum_j point_j x_j, [n]."""
    products = gram @ point
    return np.sqrt(np.maximum(np.diag(gram) - 2.0 * products + point @ products, 0.0))


def _mean_of_middle(deltas: Float64, out: int) -> Float64:
    """Return each coordinate's mean, [m], without its extremes.

    These are its `out` smallest and `out` largest values.
    """
    values = np.ascontiguousarray(deltas.T)
    values.sort(axis=1)
    return np.asarray(values[:, out : len(deltas) - out].mean(axis=1))
