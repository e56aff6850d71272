"""Quantisation in chunks: each run of `chunk` values has one float32 scale.

A scale is 0 or a normal float32. It is at most the largest float32 divided by 128 (int8) or by 2^17 (uniform), so that
no level decodes to infinity, whoever sent it.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from fedring.codec.errors import CodecError

_FLOAT32 = np.finfo(np.float32)
_LIMIT = np.float32(_FLOAT32.max / 128)
_BLOCK = 1 << 19  # values that are quantised at a time: they fit into a processor's cache


def quantise(values: NDArray[np.float32], chunk: int) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Quantise values to 8 bits.

    Args:
        values: The values [k] float32.
        chunk: How many of them share a scale, at least 1.

    Returns:
        Levels [k] int8 in ±127, and scales [ceil(k / chunk)] float32, each max|x| / 127 of its chunk.

    Raises:
        CodecError: "non_finite" if a value is NaN or infinite.
    """
    levels, scales = [np.empty(0, np.int8)], [np.empty(0, np.float32)]
    for some_levels, some_scales in quantised_blocks(values, chunk):
        levels.append(some_levels)
        scales.append(some_scales)
    return np.concatenate(levels), np.concatenate(scales)


def quantised_blocks(values: NDArray[np.float32], chunk: int) -> Iterator[tuple[NDArray[np.int8], NDArray[np.float32]]]:
    """Yield the levels and scales of each block; see `quantise`.

    Each block consists of whole chunks.
    """
    width = max(1, _BLOCK // chunk) * chunk
    scratch = np.empty((0, 0), np.float32)
    for start in range(0, values.size, width):
        block = values[start : start + width]
        rows = as_rows(block, chunk)
        if scratch.shape[1] != rows.shape[1]:
            scratch = np.empty_like(rows)
        scales = tame(peaks(rows) / np.float32(127), _LIMIT)
        levels = np.divide(rows, divisors(scales), out=scratch[: len(rows)])
        np.rint(levels, out=levels)
        if (scales == _LIMIT).any():  # no other scale makes a level above 127
            np.clip(levels, -127, 127, out=levels)
        yield levels.astype(np.int8).reshape(-1)[: block.size], scales


def dequantise(levels: NDArray[np.int8], scales: NDArray[np.float32], chunk: int, start: int) -> NDArray[np.float32]:
    """Return the values of levels.

    Args:
        levels: The levels [k] int8.
        scales: The scales float32 of the chunks that they lie in.
        chunk: How many values share a scale.
        start: The place of the first level in its chunk, counted from 0.

    Returns:
        A new array [k] float32.

    Raises:
        CodecError: "bad_scale" if a scale is not a number from 0 to the limit.
    """
    check_scales(scales, _LIMIT)
    values = levels.astype(np.float32)
    values *= spread(scales, chunk, start, levels.size)
    return values


def as_rows(values: NDArray[np.float32], chunk: int) -> NDArray[np.float32]:
    """Return `values` with one chunk a row.

    There is at least one value. The last row is filled up with zeros.
    """
    width = min(chunk, values.size)
    if values.size % width:
        values = np.pad(values, (0, -values.size % width))
    return values.reshape(-1, width)


def peaks(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return max|x| of each row; raise CodecError("non_finite") for NaN or infinity."""
    found: NDArray[np.float32] = np.maximum(rows.max(axis=1), -rows.min(axis=1))
    if not np.isfinite(found).all():
        raise CodecError("non_finite")
    return found


def tame(scales: NDArray[np.float32], limit: np.float32) -> NDArray[np.float32]:
    """Return `scales` limited to 0 and normal numbers up to `limit`.

    Subnormal scales become 0, and scales above `limit` become `limit`.
    """
    return np.where(scales < _FLOAT32.tiny, np.float32(0), np.minimum(scales, limit))


def divisors(scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return `scales` as a column to divide rows by.

    A scale of 0 is replaced by 1, so that all values of its row get level 0.
    """
    return np.where(scales == 0, np.float32(1), scales)[:, None]


def check_scales(scales: NDArray[np.float32], limit: np.float32) -> None:
    """Check that every scale is a number from 0 to `limit`.

    Raises:
        CodecError: "bad_scale".
    """
    if not ((scales >= 0) & (scales <= limit)).all():
        raise CodecError("bad_scale", f"a scale is not in 0..{limit}")


def spread(scales: NDArray[np.float32], chunk: int, start: int, count: int) -> NDArray[np.float32]:
    """Return the scale of each of `count` values, [count].

    The first value has place `start` in its chunk.
    """
    edges = np.arange(len(scales) + 1) * chunk
    return np.repeat(scales, np.diff(edges.clip(start, start + count)))
