"""Selection of the entries to keep: the largest magnitudes, exactly."""

import numpy as np
from numpy.typing import NDArray

_MAGNITUDE = np.uint32(0x7FFFFFFF)
_SAMPLES = 1 << 15
_BLOCK = 1 << 18  # entries that are compared at a time: they fit into a processor's cache


def largest(values: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Find the largest magnitudes.

    Args:
        values: The values [n] float32. NaN and infinity are larger than all others.
        count: How many to find.

    Returns:
        Their indices, rising, [count] int64; fewer only if fewer entries differ from zero. Among equal magnitudes the
        lowest indices are taken.
    """
    if count <= 0 or values.size == 0:
        return np.empty(0, np.int64)
    bits = np.ascontiguousarray(values).view(np.uint32)  # without the sign bit, they are ordered as the magnitudes are
    floor = _safe_floor(bits, count)
    indices, magnitudes = _at_least(bits, floor)
    if indices.size < count and floor > 1:  # the sample was misleading
        indices, magnitudes = _at_least(bits, np.uint32(1))
    if indices.size <= count:
        return indices
    cut = np.partition(magnitudes, indices.size - count)[indices.size - count]
    keep = magnitudes > cut
    ties = np.flatnonzero(magnitudes == cut)
    keep[ties[: count - np.count_nonzero(keep)]] = True
    kept: NDArray[np.int64] = indices[keep]
    return kept


def _safe_floor(bits: NDArray[np.uint32], count: int) -> np.uint32:
    """Return a floor for the magnitude bits of the `count` largest.

    It is at least 1, and `count` entries most likely reach it: a sample's quantile less 4 deviations.
    """
    stride = max(1, bits.size // _SAMPLES) | 1
    sample = np.sort(bits[::stride] & _MAGNITUDE)
    expected = count / bits.size * sample.size
    rank = int(expected + 4 * expected**0.5 + 8)
    return np.maximum(sample[-rank], np.uint32(1)) if rank <= sample.size else np.uint32(1)


def _at_least(bits: NDArray[np.uint32], floor: np.uint32) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
    """Return the entries with magnitude bits of at least `floor`.

    Returns:
        Their indices, rising, and their magnitude bits.
    """
    indices, magnitudes = [], []
    for start in range(0, bits.size, _BLOCK):
        block = bits[start : start + _BLOCK] & _MAGNITUDE
        found = np.flatnonzero(block >= floor)
        magnitudes.append(block[found])
        indices.append(found + start)
    return np.concatenate(indices), np.concatenate(magnitudes)
