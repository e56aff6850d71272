"""Values that share scales: each run of `chunk` values has one float32 scale.

A scale is 0 or a normal float32. It is at most the largest float32 over 128
(int8) or 2^17 (uniform), so that no level, of whatever sender, decodes to infinity.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from fedring.codec.errors import CodecError

_FLOAT32 = np.finfo(np.float32)
_LIMIT = np.float32(_FLOAT32.max / 128)
_BLOCK = 1 << 19  # values quantised at a time: what a processor's cache holds


def quantise(values: NDArray[np.float32], chunk: int) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Levels [k] in ±127 and scales [ceil(k / chunk)], max|x| / 127, of `values` [k]."""
    levels, scales = [np.empty(0, np.int8)], [np.empty(0, np.float32)]
    for some_levels, some_scales in quantised_blocks(values, chunk):
        levels.append(some_levels)
        scales.append(some_scales)
    return np.concatenate(levels), np.concatenate(scales)


def quantised_blocks(values: NDArray[np.float32], chunk: int) -> Iterator[tuple[NDArray[np.int8], NDArray[np.float32]]]:
    """As `quantise`, piece by piece, each of whole chunks; CodecError("non_finite") for NaN or infinity."""
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
    """Values [k] of `levels` [k], of which the first is number `start` of its chunk."""
    check_scales(scales, _LIMIT)
    values = levels.astype(np.float32)
    values *= spread(scales, chunk, start, levels.size)
    return values


def as_rows(values: NDArray[np.float32], chunk: int) -> NDArray[np.float32]:
    """`values`, at least one, as one chunk a row, the last filled up with zeros."""
    width = min(chunk, values.size)
    if values.size % width:
        values = np.pad(values, (0, -values.size % width))
    return values.reshape(-1, width)


def peaks(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """max|x| of each row; CodecError("non_finite") for NaN or infinity."""
    found: NDArray[np.float32] = np.maximum(rows.max(axis=1), -rows.min(axis=1))
    if not np.isfinite(found).all():
        raise CodecError("non_finite")
    return found


def tame(scales: NDArray[np.float32], limit: np.float32) -> NDArray[np.float32]:
    """`scales`, at most `limit`, and zero instead of subnormal."""
    return np.where(scales < _FLOAT32.tiny, np.float32(0), np.minimum(scales, limit))


def divisors(scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """`scales` as a column to divide rows by; 1 instead of 0, where all values round to level 0."""
    return np.where(scales == 0, np.float32(1), scales)[:, None]


def check_scales(scales: NDArray[np.float32], limit: np.float32) -> None:
    """Every scale is a number from 0 to `limit`."""
    if not ((scales >= 0) & (scales <= limit)).all():
        raise CodecError("bad_scale", f"a scale is not in 0..{limit}")


def spread(scales: NDArray[np.float32], chunk: int, start: int, count: int) -> NDArray[np.float32]:
    """The scale of each of `count` values, of which the first is number `start` of its chunk."""
    edges = np.arange(len(scales) + 1) * chunk
    return np.repeat(scales, np.diff(edges.clip(start, start + count)))
