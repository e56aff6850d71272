"""Shamir's secret sharing (Shamir 1979) modulo 2^521 - 1, with correction.

The modulus is a Mersenne prime. Any `threshold` shares of a secret give it back, and fewer say nothing about it. They
are the values of a polynomial of a degree below the threshold. With `threshold + 2 * wrong` shares, it is the only such
polynomial that fits all but `wrong` of them, and nobody needs to know which ones. The decoder is that of Gao ("A new
algorithm for decoding Reed-Solomon codes", 2003, algorithm 1): interpolate, then divide as Euclid does, half of the
way. Its work grows with the square of the number of shares.

A polynomial is a list of its coefficients, the constant first, without zeros at its end; [] is zero.
"""

import secrets
from collections.abc import Mapping
from functools import lru_cache
from itertools import zip_longest

SECRET_BYTES = 32
SHARE_BYTES = 66
PRIME = 2**521 - 1

Polynomial = list[int]


class BadShares(ValueError):
    """Shares do not belong to one secret of 32 bytes."""


def split(secret: bytes, threshold: int, count: int) -> list[bytes]:
    """Return `count` shares of a secret, the first for place 1.

    Args:
        secret: 32 bytes.
        threshold: how many shares give the secret back, 1 to `count`.
        count: how many shares there are.
    """
    if len(secret) != SECRET_BYTES or not 1 <= threshold <= count:
        raise ValueError(f"cannot split {len(secret)} bytes into {count} shares of which {threshold} are needed")
    polynomial = [int.from_bytes(secret, "little"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return [_at(polynomial, place).to_bytes(SHARE_BYTES, "little") for place in range(1, count + 1)]


def combine(shares: Mapping[int, bytes]) -> bytes:
    """Return the secret, 32 bytes, from its shares.

    Args:
        shares: by their places, from 1, as many as the threshold or more.

    Raises:
        BadShares: if they do not belong to one secret. With exactly as many shares as the threshold, a changed share
            can also give a wrong secret.
    """
    values = {place: int.from_bytes(share, "little") for place, share in shares.items()}
    if not values or any(value >= PRIME for value in values.values()):
        raise BadShares("a share is not below 2^521 - 1")
    parts = zip(values.values(), _weights(tuple(values)), strict=True)
    return _secret_of(sum(value * weight for value, weight in parts) % PRIME)


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
        return _secret_of(found[0] if found else 0)
    except BadShares:
        return None


def _secret_of(constant: int) -> bytes:
    """Return the secret, 32 bytes, from a polynomial's constant.

    Raises:
        BadShares: if it stands for none.
    """
    if constant >= 2 ** (8 * SECRET_BYTES):
        raise BadShares("the shares do not belong to one secret")
    return constant.to_bytes(SECRET_BYTES, "little")


@lru_cache(maxsize=4)  # all secrets of a group are combined of shares at the same places
def _weights(places: tuple[int, ...]) -> tuple[int, ...]:
    """Return the Lagrange weights of shares at 0.

    They are the factors of the shares at these places in the polynomial's value at 0.
    """
    weights = []
    for place in places:
        above = below = 1
        for other in places:
            if other != place:
                above = above * other % PRIME
                below = below * (other - place) % PRIME
        weights.append(above * pow(below, -1, PRIME) % PRIME)
    return tuple(weights)


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


def _at(polynomial: Polynomial, place: int) -> int:
    value = 0
    for coefficient in reversed(polynomial):
        value = (value * place + coefficient) % PRIME
    return value
