"""Vectors as integers with noise, for distributed differential privacy.

A vector is clipped, rotated, scaled, and rounded at random to integers around each value; then its share of Skellam
noise is added (Agarwal, Kairouz, Liu 2021; rotation, conditional rounding and the modulus are those of Kairouz, Liu,
Steinke 2021). Secure aggregation adds such vectors modulo 2^bits. Two sets of data are neighbours if they differ in the
vector of one client, all its values being 0 in one of them; that client's noise is in both.
"""

import hashlib
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from fedring.privacy.integer_plan import IntegerPlan
from fedring.privacy.keystream import KeyStream, check_secret
from fedring.privacy.rotation import Rotation
from fedring.privacy.skellam import SkellamNoise

_PIECE = 2**18
"""About how many values are encoded at once."""

_ATTEMPTS = 256
"""How often rounding is tried. Each attempt succeeds with a probability of at least 0.39."""


class RoundingFailed(Exception):
    """No attempt of rounding kept the norm within its bound.

    Its probability is below 2^-180.
    """


def encode_private(delta: NDArray[np.float32], plan: IntegerPlan, seed: bytes, secret: bytes) -> NDArray[np.int64]:
    """Return a client's vector as integers with its share of the noise.

    The same arguments give the same integers. Another vector, seed or plan gives independent noise, even with the same
    secret.

    Args:
        delta: [dimension], finite.
        plan: of the group.
        seed: public, the same for all clients of a round: it draws the rotation.
        secret: at least 32 bytes of this client's operating system, for this round only: it draws rounding and noise.

    Returns:
        [padded], not yet reduced modulo 2^bits.

    Raises:
        ValueError: if the vector has another length, or a value that is not finite, or the secret is too short.
        RoundingFailed: if no rounding keeps the norm.
    """
    check_secret(secret)
    if delta.shape != (plan.dimension,):
        raise ValueError(f"a vector of the shape {delta.shape} is not one of {plan.dimension} values")
    delta = np.ascontiguousarray(delta, "<f4")
    factor = _factor(delta, plan)
    context = [hashlib.sha256(delta.data).hexdigest(), repr(plan), seed.hex()]
    rotation = Rotation(seed, plan.block)
    whole = np.empty(plan.padded, np.int64)
    # Conditional rounding: rounding is drawn again until the norm is within the bound on which the charge is based.
    for attempt in range(_ATTEMPTS):
        random = KeyStream(secret, ["rounding", str(attempt), *context])
        square = sum(_round(delta, piece, start, factor, rotation, random) for piece, start in _pieces(whole, plan))
        if square <= plan.rounded_norm**2:
            break
    else:
        raise RoundingFailed(f"the norm is above {plan.rounded_norm:g} after {_ATTEMPTS} attempts of rounding")
    streams = (KeyStream(secret, [name, *context]) for name in ("noise", "noise, lower words"))
    noise = SkellamNoise(plan.local_variance, *streams)
    for piece, start in _pieces(whole, plan):
        piece += noise.draw(start, start + len(piece))
    return whole


def decode_sum(total: NDArray[np.int64], plan: IntegerPlan, seed: bytes, start: int) -> NDArray[np.float64]:
    """Return a piece of the clients' noisy sum from its integers.

    Args:
        total: [m], whole blocks of the sum modulo 2^bits. Which of the numbers of the same residue does not matter.
        plan: of the group.
        seed: that of the clients.
        start: the place of the first value in the padded vector, a multiple of the block.

    Returns:
        [m]; those from `dimension` on are padding.

    Raises:
        ValueError: if the piece is not whole blocks.
    """
    half = 1 << (plan.bits - 1)
    # Residues stand for numbers from -2^(bits - 1) to 2^(bits - 1) - 1.
    values = (((total + half) & (2 * half - 1)) - half).astype(np.float64)
    Rotation(seed, plan.block).undo(values, start)
    values /= plan.scale
    return values


def _factor(delta: NDArray[np.float32], plan: IntegerPlan) -> float:
    """Return the factor that clips the vector and scales it to integers."""
    square = 0.0
    for at in range(0, len(delta), _PIECE):
        piece = delta[at : at + _PIECE].astype(np.float64)
        square += float(np.dot(piece, piece))
    if not np.isfinite(square):
        raise ValueError("the vector has a value that is not finite")
    norm = sqrt(square)
    return plan.scale * (min(1.0, plan.clip / norm) if norm else 1.0)


def _round(
    delta: NDArray[np.float32],
    whole: NDArray[np.int64],
    start: int,
    factor: float,
    rotation: Rotation,
    random: KeyStream,
) -> float:
    """Write a piece of the rotated vector, rounded at random.

    It is written to `whole`.

    Returns:
        The square of its norm.
    """
    values = np.zeros(len(whole))
    given = delta[start : start + len(whole)]
    np.multiply(given, factor, out=values[: len(given)])
    rotation.apply(values, start)
    drawn = np.frombuffer(random.read(4 * start, 4 * (start + len(whole))), "<u4")
    values += drawn * 2.0**-32
    np.floor(values, out=values)
    whole[:] = values
    return float(np.dot(values, values))


def _pieces(whole: NDArray[np.int64], plan: IntegerPlan) -> list[tuple[NDArray[np.int64], int]]:
    size = max(plan.block, _PIECE // plan.block * plan.block)
    return [(whole[start : start + size], start) for start in range(0, len(whole), size)]
