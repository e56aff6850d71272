"""Shamir's secret sharing (Shamir 1979) modulo 2^521 - 1.

The modulus is a Mersenne prime. Any `threshold` shares of a secret give it back, and fewer say nothing about it.
"""

import secrets
from collections.abc import Mapping
from functools import lru_cache

SECRET_BYTES = 32
SHARE_BYTES = 66
PRIME = 2**521 - 1


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
    return secret_of(sum(value * weight for value, weight in parts) % PRIME)


def secret_of(constant: int) -> bytes:
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


def _at(polynomial: list[int], place: int) -> int:
    value = 0
    for coefficient in reversed(polynomial):
        value = (value * place + coefficient) % PRIME
    return value
