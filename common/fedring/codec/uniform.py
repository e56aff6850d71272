"""The format uniform: entropy-coded multiples of each chunk's scale.

scale = step times the chunk's root mean square, level = round(x / scale) with |level| <= 65535; the scale is raised
where a level would not fit. In a segment (segments.py) of n entries, m have a level other than 0, and r of those a
magnitude above 3. The segment is

    scales[ceil(n / chunk)] f32
    stream nonzero: ceil(n / 8) bytes, one bit an entry
    stream signs: ceil(m / 8) bytes, one bit a nonzero level, 1 = negative
    stream small: ceil(m / 4) bytes, two bits a nonzero level, min(magnitude - 1, 3)
    stream large: 2 r bytes, first the low, then the high bytes of magnitude - 4

Equal bits and pairs of neighbours lie in the same bytes, so that neighbours that are alike cost little.
"""

import numpy as np
from numpy.typing import NDArray

from fedring.codec.chunks import as_rows, check_scales, divisors, peaks, spread, tame
from fedring.codec.decoder import Decoder
from fedring.codec.encoding import Encoding
from fedring.codec.segments import Segment, Segments, join_segments, pack_bits, span_of, stream, unpack_bits
from fedring.codec.source import Source

_MAGIC = b"UQ"
_LARGEST = 65535
_LIMIT = np.float32(np.finfo(np.float32).max / 2**17)  # a magnitude is read as at most 65535 + 4
_PAIRS = np.arange(256, dtype=np.uint8)[:, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3  # by byte, its four values
_FOURS = np.ascontiguousarray(_PAIRS).view("<u4")[:, 0]  # the same, as one number for each byte


def encode_uniform(vector: NDArray[np.float32], encoding: Encoding) -> bytes:
    """Encode a vector.

    Args:
        vector: The values [D] float32.
        encoding: Has the step, and how many values share a scale.

    Raises:
        CodecError: "non_finite" if a value is NaN or infinite.
    """
    span = span_of(encoding.chunk)
    segments = [
        _encode_segment(vector[start : start + span], encoding.chunk, encoding.step)
        for start in range(0, vector.size, span)
    ]
    return join_segments(_MAGIC, encoding.chunk, vector.size, segments)


class UniformDecoder(Decoder):
    """An open payload of uniform.

    Args:
        source: The bytes.
        length: The number of entries that the receiver expects.
    """

    def __init__(self, source: Source, length: int) -> None:
        self._segments = Segments(source, _MAGIC, length)

    def decode(self, start: int, stop: int) -> NDArray[np.floating]:
        """See Decoder.decode."""
        parts = [np.empty(0, np.float32)]
        for segment, low, high in self._segments.covering(start, stop):
            values = _decode_segment(segment, high - low, self._segments.chunk)
            parts.append(values[max(start, low) - low : min(stop, high) - low])
        return parts[1] if len(parts) == 2 else np.concatenate(parts)


def _encode_segment(values: NDArray[np.float32], chunk: int, step: float) -> bytes:
    rows = as_rows(values, chunk)
    scales = _scales(rows, values.size, step)
    levels = np.rint(rows / divisors(scales)).reshape(-1)[: values.size]
    nonzero = levels != 0
    levels = levels[np.flatnonzero(nonzero)]  # several times faster than indexing by booleans
    above = np.minimum(np.abs(levels), _LARGEST).astype(np.uint32) - 1
    large = (above[above >= 3] - 3).astype("<u2").view(np.uint8).reshape(-1, 2)
    return b"".join(
        (
            scales.astype("<f4", copy=False).data,
            stream(pack_bits(nonzero)),
            stream(pack_bits(levels < 0)),
            stream(_pack_pairs(np.minimum(above, 3).astype(np.uint8))),
            stream(np.ascontiguousarray(large.T).reshape(-1)),
        )
    )


def _scales(rows: NDArray[np.float32], count: int, step: float) -> NDArray[np.float32]:
    """Return the scale of each row; all rows together hold `count` values."""
    counts = np.full(len(rows), rows.shape[1])
    counts[-1] -= rows.size - count
    floor = peaks(rows) / np.float32(_LARGEST)
    scales = step * np.sqrt(np.square(rows, dtype=np.float64).sum(axis=1) / counts)
    return tame(np.maximum(scales.clip(max=_LIMIT).astype(np.float32), floor), _LIMIT)


def _pack_pairs(values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return two-bit values packed four to a byte.

    The first is in the lowest bits.
    """
    fours = np.pad(values, (0, -values.size % 4)).reshape(-1, 4)
    two, four, six = np.array([2, 4, 6], np.uint8)
    packed: NDArray[np.uint8] = fours[:, 0] | fours[:, 1] << two | fours[:, 2] << four | fours[:, 3] << six
    return packed


def _decode_segment(segment: Segment, length: int, chunk: int) -> NDArray[np.float32]:
    """Return the values of a segment of `length` entries."""
    scales = segment.floats(-(-length // chunk))
    check_scales(scales, _LIMIT)
    nonzero = np.flatnonzero(unpack_bits(segment.stream(-(-length // 8)), length))
    count = nonzero.size
    negative = unpack_bits(segment.stream(-(-count // 8)), count)
    magnitudes = _FOURS[segment.stream(-(-count // 4))].view(np.uint8)[:count].astype(np.float32) + 1
    large = np.flatnonzero(magnitudes == 4)
    planes = segment.stream(2 * large.size).reshape(2, -1)
    segment.end()
    magnitudes[large] += planes[0] + planes[1] * np.float32(256)
    values = np.zeros(length, np.float32)
    values[nonzero] = np.where(negative, -magnitudes, magnitudes)
    values *= spread(scales, chunk, 0, length)
    return values
