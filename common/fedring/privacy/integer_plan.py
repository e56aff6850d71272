"""The plan by which clients encode vectors as noisy integers.

Their sum is differentially private. Both sides derive the same plan from the settings of a job and the number of
clients. Norms and variances are in units of one integer; one unit of the vector is `scale` integers.
"""

from dataclasses import dataclass
from math import cosh, floor, frexp, inf, isfinite, ldexp, log, sqrt

from fedring.privacy.charges import SkellamCharge
from fedring.privacy.skellam import MAX_VARIANCE, MIN_VARIANCE

BLOCK, MIN_BLOCK = 4096, 8
"""How many values are rotated together, and the fewest."""

WRAP_PROBABILITY = 1e-6
"""The most probable that any value of a sum leaves the range of the modulus, in one round."""

MIN_BITS, BITS, MAX_BITS = 8, 20, 48
"""The bits of the modulus: the fewest, as many as are enough for most groups, and the most."""

FEW_ROUNDING, _MAX_ROUNDING = 1.01, 1.1
"""How much larger than the clip the norm may be after rounding: the aim, and the most."""

_FINE = 16.0
"""The clip need not be more than this times the square root of the dimension: rounding then makes the norm larger by a
part in two thousand."""

_QUIET = 8.0
"""Nor need the noise on the sum be more than this times the root of the clients, which round by at most 1/2 each."""


@dataclass(frozen=True, slots=True)
class IntegerPlan:
    """The parameters for encoding a vector and decoding a sum.

    A client encodes, and the server decodes.
    """

    clip: float  # the L2 norm to which vectors are shortened, in their own unit
    scale: float  # integers per unit
    bits: int  # sums are modulo 2^bits
    block: int  # values that are rotated together, a power of two
    dimension: int  # values of the vector
    rounded_norm: float  # the most that the L2 norm of a client's rounded vector can be, in integers
    local_variance: float  # of the Skellam noise that each client adds to each value
    central_variance: float  # of the noise on each value of the sum, if the fewest clients remain

    @property
    def padded(self) -> int:
        """The number of integers that a client sends.

        It is the dimension, rounded up to whole blocks.
        """
        return -(-self.dimension // self.block) * self.block

    @property
    def charge(self) -> SkellamCharge:
        """The privacy cost of the sum."""
        return SkellamCharge(self.rounded_norm, self.padded, self.central_variance)

    @property
    def multiplier(self) -> float:
        """The noise multiplier of the sum: `noise_multiplier`, or less.

        It is the noise on the sum in units of the most that one client can change it.
        """
        return sqrt(self.central_variance) / self.rounded_norm


def integer_plan(
    *,
    clip: float,
    noise_multiplier: float,
    clients: int,
    survivors: int,
    dimension: int,
    bits: int = BITS,
    block: int = BLOCK,
) -> IntegerPlan:
    """Return the plan of a group of clients.

    The scale is the largest with which no value of the sum leaves the range of the modulus, but with the probability
    `WRAP_PROBABILITY` in a round, whatever the clients' vectors are, if they do not depend on the round's seed; and no
    larger than is useful. A value that leaves the range costs accuracy, and no privacy.

    Rounding makes a vector longer. So the sum is a little less private than with Gaussian noise of the same multiplier:
    compare a site's demands with `IntegerPlan.multiplier`, and account for `IntegerPlan.charge`.

    Args:
        clip: the L2 norm to which each client's vector is shortened, above 0.
        noise_multiplier: the standard deviation of the noise that the survivors' sum has on each value, in units of the
            clip. A sum of more clients has more noise.
        clients: the most whose vectors are added.
        survivors: the fewest whose noise is in a sum that anybody sees. Clients who tell others of their own noise do
            not count: to be private from c clients who share their knowledge with the server, subtract c.
        dimension: the number of values of a vector.
        bits: of the modulus.
        block: how many values are rotated together, a power of two.

    Raises:
        ValueError: if an argument is out of its range, or the bits are too few or the noise too much for the dimension.
    """
    if not (isfinite(clip) and clip > 0.0):
        raise ValueError(f"clip = {clip} is not a finite number above 0")
    if not MIN_BITS <= bits <= MAX_BITS:
        raise ValueError(f"bits = {bits} is not from {MIN_BITS} to {MAX_BITS}")
    group = _Group(noise_multiplier, clients, survivors, dimension, block)
    norm = group.norm(bits)
    # Rounding adds up to 1 to each value. If the norm in integers is small, that dominates, and the sum would be less
    # private than its noise multiplier says.
    if group.rounding(norm) > _MAX_ROUNDING:
        fewest = group.fewest_bits(_MAX_ROUNDING)
        advice = f": {fewest} are needed" if fewest > bits else ", and so are any: less noise is needed"
        raise ValueError(f"bits = {bits} are too few for {group}{advice}")
    variance = (noise_multiplier * norm) ** 2
    if variance / survivors < MIN_VARIANCE:
        raise ValueError(f"noise_multiplier = {noise_multiplier:g} is too small for integers of {bits} bits")
    return IntegerPlan(
        clip=clip,
        scale=norm / clip,
        bits=bits,
        block=block,
        dimension=dimension,
        rounded_norm=norm * group.rounding(norm),
        local_variance=variance / survivors,
        central_variance=variance,
    )


def fewest_bits(
    *,
    noise_multiplier: float,
    clients: int,
    survivors: int,
    dimension: int,
    block: int = BLOCK,
    rounding: float = FEW_ROUNDING,
) -> int:
    """Return the fewest bits with little growth by rounding.

    Rounding then makes the norm larger by no more than a factor. If the noise is too much for that factor, return the
    fewest bits with which more would not help.

    Args:
        noise_multiplier: as for `integer_plan`, and so are `clients`, `survivors`, `dimension` and `block`.
        rounding: the factor, above 1.001. It raises epsilon by about the same.

    Raises:
        ValueError: if an argument is out of its range.
    """
    return _Group(noise_multiplier, clients, survivors, dimension, block).fewest_bits(rounding)


@dataclass(frozen=True, slots=True)
class _Group:
    """The parameters of the scale, besides the bits.

    The norm is that of the clip, in integers.
    """

    noise_multiplier: float
    clients: int
    survivors: int
    dimension: int
    block: int

    def __post_init__(self) -> None:
        if not (isfinite(self.noise_multiplier) and self.noise_multiplier > 0.0):
            raise ValueError(f"noise_multiplier = {self.noise_multiplier} is not a finite number above 0")
        if not 1 <= self.survivors <= self.clients:
            raise ValueError(f"survivors = {self.survivors} is not from 1 to clients = {self.clients}")
        if self.dimension < 1:
            raise ValueError(f"dimension = {self.dimension} is not above 0")
        if self.block < MIN_BLOCK or self.block & (self.block - 1):
            raise ValueError(f"block = {self.block} is not a power of two of at least {MIN_BLOCK}")

    def __str__(self) -> str:
        return f"{self.dimension} values of {self.clients} clients with noise_multiplier = {self.noise_multiplier:g}"

    def norm(self, bits: int) -> float:
        """Return the norm of the clip in integers for a modulus.

        It is 0 if there are too few bits for any.
        """
        useful = max(_FINE * sqrt(self._padded), _QUIET * sqrt(self.clients) / self.noise_multiplier)
        drawn = sqrt(MAX_VARIANCE * self.survivors) / self.noise_multiplier
        return _round_down(min(self._largest(bits), useful, drawn))

    def rounding(self, norm: float) -> float:
        """Return the largest growth factor of a norm by rounding.

        Rounding is repeated until the norm is within the bound of Kairouz, Liu, Steinke (2021) for conditional
        rounding, with beta = exp(-1/2), which makes one of its factors 1.
        """
        if not norm:
            return inf
        root = sqrt(self._padded)
        likely = norm * norm + root * root / 4.0 + norm + root / 2.0
        return min(norm + root, sqrt(likely)) / norm

    def fewest_bits(self, rounding: float) -> int:
        """Return the fewest bits with at most this growth by rounding.

        If no number of bits reaches it, return the fewest with which more would not help.
        """
        reached = max(rounding, self.rounding(self.norm(MAX_BITS)))
        return next(bits for bits in range(MIN_BITS, MAX_BITS + 1) if self.rounding(self.norm(bits)) <= reached)

    @property
    def _padded(self) -> int:
        return -(-self.dimension // self.block) * self.block

    def _largest(self, bits: int) -> float:
        """Return the largest norm that keeps a sum in the range."""
        below, above = 0.0, ldexp(1.0, bits)
        for _ in range(64):
            middle = (below + above) / 2.0
            below, above = (middle, above) if self._stays(middle, bits) else (below, middle)
        return below

    def _stays(self, norm: float, bits: int) -> bool:
        """Return whether values of the sum leave the range rarely enough.

        The probability that any of them does is compared with `WRAP_PROBABILITY`. Rounding moves each value of the sum
        by less than 1 for each client. The rest is bounded by Chernoff's method: a sum of k vectors has the norm k
        norm, hence after a rotation with random signs, each value is sub-Gaussian with the variance (k norm)^2 / block;
        the noise has the moments exp(v (cosh(x) - 1)).
        """
        room = ldexp(1.0, bits - 1) - self.clients
        if room <= 0.0:
            return False
        signal = (self.clients * norm) ** 2 / self.block
        noise = (self.noise_multiplier * norm) ** 2 * self.clients / self.survivors
        if signal + noise == 0.0:
            return True
        x = min(room / (signal + noise), 1.0)
        exponent = x * x * signal / 2.0 + noise * (cosh(x) - 1.0) - x * room
        return exponent + log(2.0 * self._padded) <= log(WRAP_PROBABILITY)


def _round_down(value: float) -> float:
    """Return a number rounded down to 20 significant bits.

    So the last bits of different computers cannot make different plans.
    """
    fraction, exponent = frexp(value)
    return ldexp(floor(ldexp(fraction, 20)), exponent - 20)
