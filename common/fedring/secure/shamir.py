"""Shamir's secret sharing (Shamir 1979) over the integers modulo the Mersenne prime 2^521 - 1.

Any `threshold` shares of a secret give it back, and fewer say nothing about it.
"""

import secrets
from collections.abc import Mapping

SECRET_BYTES = 32
SHARE_BYTES = 66

_PRIME = 2**521 - 1


class BadShares(ValueError):
    """Shares do not belong to one secret of 32 bytes."""


def split(secret: bytes, threshold: int, count: int) -> list[bytes]:
    """Return `count` shares of a secret, the first of them for the place 1.

    Args:
        secret: 32 bytes.
        threshold: how many shares give the secret back, 1 to `count`.
        count: how many shares there are.
    """
    if len(secret) != SECRET_BYTES or not 1 <= threshold <= count:
        raise ValueError(f"cannot split {len(secret)} bytes into {count} shares of which {threshold} are needed")
    polynomial = [int.from_bytes(secret, "little"), *(secrets.randbelow(_PRIME) for _ in range(threshold - 1))]
    return [_at(polynomial, place).to_bytes(SHARE_BYTES, "little") for place in range(1, count + 1)]


def combine(shares: Mapping[int, bytes]) -> bytes:
    """Return the secret, 32 bytes, that shares belong to.

    Args:
        shares: by their places, from 1, as many as the threshold or more.

    Raises:
        BadShares: if they do not belong to one secret. With exactly as many shares as the threshold, a changed share
            can also give a wrong secret.
    """
    values = {place: int.from_bytes(share, "little") for place, share in shares.items()}
    if not values or any(value >= _PRIME for value in values.values()):
        raise BadShares("a share is not below 2^521 - 1")
    total = 0
    for place, value in values.items():
        above = below = 1
        for other in values:
            if other != place:
                above = above * other % _PRIME
                below = below * (other - place) % _PRIME
        total = (total + value * above * pow(below, -1, _PRIME)) % _PRIME
    if total >= 2 ** (8 * SECRET_BYTES):
        raise BadShares("the shares do not belong to one secret")
    return total.to_bytes(SECRET_BYTES, "little")


def _at(polynomial: list[int], place: int) -> int:
    value = 0
    for coefficient in reversed(polynomial):
        value = (value * place + coefficient) % _PRIME
    return value
