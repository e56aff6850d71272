"""Reed-Solomon decoding of Shamir shares, some of them wrong.

Nobody knows beforehand which ones are wrong.

The shares of a secret are the values of a polynomial of a degree below the threshold. With `threshold + 2 * wrong`
shares, it is the only such polynomial that fits all but `wrong` of them. The decoder is that of Gao ("A new algorithm
for decoding Reed-Solomon codes", 2003, algorithm 1): interpolate, then divide as Euclid does, half of the way. Its work
grows with the square of the number of shares.

A polynomial is a list of its coefficients, the constant first, without zeros at its end; [] is zero.
"""

from collections.abc import Mapping
from itertools import zip_longest

from fedring.secure.shamir import PRIME, BadShares, secret_of

Polynomial = list[int]


def correct(shares: Mapping[int, bytes], threshold: int) -> bytes | None:
    """Return the secret that most shares belong to, 32 bytes.

    None if too many are wrong.

    Args:
        shares: by their places, from 1, as many as the threshold or more. Up to half of those above it may be wrong.
        threshold: how many shares give the secret.
    """
    values = {place: value for place, share in shares.items() if (value := int.from_bytes(share, "little")) < PRIME}
    if len(values) < threshold:
        return None
    product, fitting = _interpolated(values)
    older, newer = product, fitting
    factor_older: Polynomial = []
    factor: Polynomial = [1]
    # Stop halfway: below this degree, the rest is the message times the locator of the wrong shares.
    while 2 * (len(newer) - 1) >= len(values) + threshold:
        quotient, rest = _divided(older, newer)
        older, newer = newer, rest
        factor_older, factor = factor, _minus(factor_older, _times(quotient, factor))
    found, rest = _divided(newer, factor)
    # A remainder, or too high a degree, means more wrong shares than the code can correct.
    if rest or len(found) > threshold:
        return None
    try:
        return secret_of(found[0] if found else 0)
    except BadShares:
        return None


def _interpolated(values: Mapping[int, int]) -> tuple[Polynomial, Polynomial]:
    """Return the vanishing and the interpolating polynomial of some places (Newton).

    The first is 0 at all places, the second has the given values there.
    """
    product: Polynomial = [1]
    fitting: Polynomial = []
    for place, value in values.items():
        missing = (value - _at(fitting, place)) * pow(_at(product, place), -1, PRIME) % PRIME
        fitting = _trimmed([(a + missing * b) % PRIME for a, b in zip_longest(fitting, product, fillvalue=0)])
        product = _minus([0, *product], [coefficient * place % PRIME for coefficient in product])
    return product, fitting


def _at(polynomial: Polynomial, place: int) -> int:
    value = 0
    for coefficient in reversed(polynomial):
        value = (value * place + coefficient) % PRIME
    return value


def _times(first: Polynomial, second: Polynomial) -> Polynomial:
    total = [0] * (len(first) + len(second))
    for power, coefficient in enumerate(first):
        for other, factor in enumerate(second):
            total[power + other] += coefficient * factor
    return _trimmed([value % PRIME for value in total])


def _minus(first: Polynomial, second: Polynomial) -> Polynomial:
    return _trimmed([(a - b) % PRIME for a, b in zip_longest(first, second, fillvalue=0)])


def _divided(above: Polynomial, below: Polynomial) -> tuple[Polynomial, Polynomial]:
    """Return the quotient and the remainder; `below` is not zero."""
    rest, inverse = list(above), pow(below[-1], -1, PRIME)
    quotient = [0] * max(0, len(above) - len(below) + 1)
    for power in reversed(range(len(quotient))):
        factor = quotient[power] = rest[power + len(below) - 1] * inverse % PRIME
        for place, coefficient in enumerate(below):
            rest[power + place] = (rest[power + place] - factor * coefficient) % PRIME
    return _trimmed(quotient), _trimmed(rest)


def _trimmed(polynomial: Polynomial) -> Polynomial:
    while polynomial and not polynomial[-1]:
        polynomial.pop()
    return polynomial
