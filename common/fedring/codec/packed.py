"""The format packed: gaps and int8 levels of the kept entries.

Both are entropy coded. A segment (segments.py) without kept entries is empty. Any other one is

    n u32   bits u32   scales[ceil(n / chunk)] f32   stream levels[n] i8
    stream high[n] u8   low planes: bits times ceil(n / 8) bytes

The gap of an entry is the number of entries that were left out before it in its segment; high = gap >> bits, and bit j
of the gap, j < bits, is in low plane j. A gap that is too large for that is bridged by entries of level 0, each
256 << bits places after the one before.
"""

import struct

import numpy as np
from numpy.typing import NDArray

from fedring.codec.chunks import dequantise, quantise
from fedring.codec.decoder import SparseDecoder
from fedring.codec.encoding import Encoding
from fedring.codec.errors import CodecError
from fedring.codec.segments import Segment, Segments, join_segments, pack_bits, span_of, stream, unpack_bits
from fedring.codec.source import Source
from fedring.codec.sparse import kept

_MAGIC = b"PK"
_COUNTS = struct.Struct("<II")
_MAX_BITS = 12  # a gap has at most 20 bits


def encode_packed(vector: NDArray[np.float32], encoding: Encoding) -> bytes:
    """Encode the largest entries of a vector.

    Args:
        vector: The values [D] float32.
        encoding: Has the share of the entries to keep, and how many of them share a scale.

    Raises:
        CodecError: "non_finite" if a value is NaN or infinite.
    """
    indices, values = kept(vector, encoding.keep_ratio)
    span = span_of(encoding.chunk)
    edges = range(0, vector.size, span)
    cuts = [*np.searchsorted(indices, edges).tolist(), indices.size]
    segments = [
        _encode_segment(indices[low:high] - edge, values[low:high], encoding.chunk)
        for edge, low, high in zip(edges, cuts, cuts[1:], strict=False)
    ]
    return join_segments(_MAGIC, encoding.chunk, vector.size, segments)


class PackedDecoder(SparseDecoder):
    """An open payload of packed.

    Args:
        source: The bytes.
        length: The number of entries that the receiver expects.
    """

    def __init__(self, source: Source, length: int) -> None:
        self._segments = Segments(source, _MAGIC, length)

    def entries(self, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """See SparseDecoder.entries."""
        found_positions, found_values = [np.empty(0, np.int64)], [np.empty(0, np.float32)]
        for segment, low, high in self._segments.covering(start, stop):
            positions, values = _decode_segment(segment, high - low, self._segments.chunk)
            first, last = np.searchsorted(positions, (start - low, stop - low)).tolist()
            found_positions.append(positions[first:last] + (low - start))
            found_values.append(values[first:last])
        return np.concatenate(found_positions), np.concatenate(found_values)


def _encode_segment(positions: NDArray[np.int64], values: NDArray[np.float32], chunk: int) -> bytes:
    if not positions.size:
        return b""
    steps = np.diff(positions, prepend=-1)
    bits = _low_bits(steps)
    steps, values = _bridge(steps, values, 256 << bits)
    gaps = steps - 1
    levels, scales = quantise(values, chunk)
    return b"".join(
        (
            _COUNTS.pack(gaps.size, bits),
            scales.astype("<f4", copy=False).data,
            stream(levels.view(np.uint8)),
            stream((gaps >> bits).astype(np.uint8)),
            *(pack_bits((gaps >> j & 1).astype(np.bool_)).data for j in range(bits)),
        )
    )


def _low_bits(steps: NDArray[np.int64]) -> int:
    """Return the number of low bits to send uncoded.

    Half of the gaps then have a high part below 16, which codes well.
    """
    median = int(np.partition(steps, steps.size // 2)[steps.size // 2])
    return min(max(0, median.bit_length() - 4), _MAX_BITS)


def _bridge(
    steps: NDArray[np.int64], values: NDArray[np.float32], reach: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Divide steps larger than `reach`, and insert zeros.

    Returns:
        Steps of at most `reach`, and the values, with a zero wherever a larger step was divided.
    """
    bridges = (steps - 1) // reach
    if not bridges.any():
        return steps, values
    ends = np.cumsum(bridges + 1) - 1
    all_steps = np.full(ends[-1] + 1, reach, np.int64)
    all_values = np.zeros(ends[-1] + 1, np.float32)
    all_steps[ends] = steps - bridges * reach
    all_values[ends] = values
    return all_steps, all_values


def _decode_segment(segment: Segment, length: int, chunk: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return the positions and values of a segment's entries.

    The positions rise strictly and are below `length`.
    """
    if not len(segment):
        return np.empty(0, np.int64), np.empty(0, np.float32)
    count, bits = segment.number(), segment.number()
    if not 1 <= count <= length or bits > _MAX_BITS:
        raise CodecError("bad_header", f"{count} entries of {bits} low bits in a segment of {length}")
    scales = segment.floats(-(-count // chunk))
    levels = segment.stream(count).view(np.int8)
    steps = segment.stream(count).astype(np.int64) << bits
    for j in range(bits):
        steps |= unpack_bits(segment.take(-(-count // 8)), count).astype(np.int64) << j
    segment.end()
    positions = np.cumsum(steps + 1) - 1
    if positions[-1] >= length:
        raise CodecError("bad_indices")
    return positions, dequantise(levels, scales, chunk, 0)
