"""The privacy cost of one release, over the Renyi order.

It is a curve of Renyi differential privacy (Mironov 2017). A charge is one of two things, and the curves of any charges
add up:

- a number: the standard deviation of Gaussian noise, in units of the most that one client can change the release;
- a `SkellamCharge`: integers with Skellam noise.
"""

from dataclasses import dataclass
from math import ceil, floor, hypot, isfinite, log1p, sqrt
from typing import Self

_PREFIX = "skellam"


@dataclass(frozen=True, slots=True)
class SkellamCharge:
    """The cost of a sum of integer vectors with Skellam noise.

    `variance` is that of the noise on each value: the mu of Agarwal, Kairouz, Liu (2021), whose noise is the difference
    of two Poisson variables with the mean mu / 2 each.
    """

    norm: float  # the most that one client can change the sum, in L2 norm
    dimension: int  # values of the sum
    variance: float

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ValueError: if one of them is not finite and above 0.
        """
        for value in (self.norm, self.dimension, self.variance):
            if not (isfinite(value) and value > 0):
                raise ValueError(f"{value} is not a finite number above 0")

    def __str__(self) -> str:
        """Return the text that `charge_of` reads."""
        return " ".join([_PREFIX, *(repr(value) for value in (self.norm, self.dimension, self.variance))])

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a charge from the text that `str` made of it.

        Raises:
            ValueError: if it is no such text.
        """
        prefix, *values = text.split(" ")
        if prefix != _PREFIX or len(values) != 3:
            raise ValueError(f"{text[:100]!r} is no charge of Skellam noise")
        return cls(float(values[0]), int(values[1]), float(values[2]))

    def renyi(self, order: float) -> float:
        """Return an upper bound of the Renyi divergence.

        Args:
            order: above 1.
        """
        lower, upper = floor(order), ceil(order)
        if lower == upper:
            return self._at_integer(lower)
        share = order - lower  # order times divergence is convex, and lies below the line between integer orders
        at_lower = (lower - 1) * self._at_integer(lower) if lower > 1 else 0.0
        line = ((1.0 - share) * at_lower + share * (upper - 1) * self._at_integer(upper)) / (order - 1.0)
        return min(line, self._by_curvature(order))

    def _at_integer(self, order: int) -> float:
        """Return the bound of Agarwal, Kairouz, Liu (2021) for integer orders.

        A vector of integers has an L1 norm of at most the square of its L2 norm.
        """
        square, variance = self.norm * self.norm, self.variance
        norm1 = min(square, sqrt(self.dimension) * self.norm)
        for_large = ((2 * order - 1) * square + 6.0 * norm1) / variance / (4.0 * variance)
        return order * square / (2.0 * variance) + min(for_large, 1.5 * norm1 / variance)

    def _by_curvature(self, order: float) -> float:
        """Return a bound for all orders.

        It is close to the Gaussian bound if the variance is large. Let f(k) be -log P(X = k), and L the largest second
        difference of f. Then f(k) - L k^2 / 2 is concave, and stays so if it is interpolated linearly. Applied to the
        points k - a s, k - s and k, where the middle one is a mean of the others, this bounds the sum of
        P(X = k - s)^a P(X = k)^(1 - a), in which the order a need not be an integer, by
        exp(L s^2 a (a - 1) / 2) times a sum of P(X = k) over k from a lattice that is moved by a s. By Hoelder's
        inequality, the latter is at most exp(L / 8), because of the interpolation.

        With y = x I_n'(x) / I_n(x), the second difference at n is -log(1 - y' / x). It is largest at 0: Riccati's
        equation x y' = x^2 + n^2 - y^2 shows that dy/dn falls in x. So L = 2 log(I_0(v) / I_1(v)), and Amos (1974)
        bounds that ratio by (1/2 + sqrt(v^2 + 9/4)) / v.
        """
        variance = self.variance
        root = hypot(variance, 1.5)
        curvature = 2.0 * log1p((0.5 + 2.25 / (root + variance)) / variance)
        square = self.norm * self.norm
        changed = min(square, float(self.dimension))  # values
        return curvature * (order * square / 2.0 + changed / (8.0 * (order - 1.0)))


Charge = float | SkellamCharge


def charge_of(text: str) -> Charge:
    """Parse a charge from the text that `str` made of it.

    Raises:
        ValueError: if it is no such text, or its charge is not finite and above 0.
    """
    if text.startswith(_PREFIX):
        return SkellamCharge.parse(text)
    multiplier = float(text)
    if not (isfinite(multiplier) and multiplier > 0.0):
        raise ValueError(f"{text[:100]!r} is not a finite number above 0")
    return multiplier


def renyi(charge: Charge, order: float) -> float:
    """Return an upper bound of the Renyi divergence of a release.

    The divergence is that between the release with and without one client, of an order above 1.
    """
    if isinstance(charge, SkellamCharge):
        return charge.renyi(order)
    return order * 0.5 / charge / charge
