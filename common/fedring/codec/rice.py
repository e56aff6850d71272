"""Rice coding of gaps for a whole array (Rice and Plaunt 1971).

    low    the lowest `bits` bits of every gap, lowest first      ceil(count * bits / 8) bytes
    high   for every gap (gap >> bits) zeros, then a one          the rest

The two halves are kept apart, so that each is one bit field. A gap is the number of entries that were left out between
two kept ones; the sum of `count` gaps in `size` entries is at most size - count.
"""

from math import floor, log, log2

import numpy as np
from numpy.typing import NDArray

from fedring.codec.errors import CodecError

MAX_BITS = 31
_GOLDEN = log((5**0.5 - 1) / 2)


def bits_for(count: int, size: int) -> int:
    """Return the number of low bits for gaps (Kiely 2004, eq. 8).

    Args:
        count: The number of gaps, at least 1.
        size: The number of entries over which they are spread evenly.
    """
    mean = (size - count) / count
    if mean < 1:
        return 0
    return min(MAX_BITS, max(0, 1 + floor(log2(_GOLDEN / log(mean / (mean + 1))))))


def coded_size(gaps: NDArray[np.int64], bits: int) -> int:
    """Return the size in bytes of `gaps` [count], Rice coded.

    Args:
        gaps: The gaps.
        bits: The number of low bits.
    """
    return -(-gaps.size * bits // 8) + -(-(gaps.size + int((gaps >> bits).sum())) // 8)


def largest_size(count: int, size: int, bits: int) -> int:
    """Return the largest coded size in bytes of any gaps.

    Args:
        count: The number of gaps.
        size: The number of entries that they lie in.
        bits: The number of low bits.
    """
    return -(-count * bits // 8) + -(-(count + ((size - count) >> bits)) // 8)


def pack_gaps(gaps: NDArray[np.int64], bits: int) -> bytes:
    """Encode `gaps` [count] with `bits` low bits, in coded_size(gaps, bits) bytes."""
    low = np.empty((gaps.size, bits), np.bool_)
    for j in range(bits):
        low[:, j] = gaps >> j & 1
    ends = np.cumsum((gaps >> bits) + 1)
    high = np.zeros(int(ends[-1]) if ends.size else 0, np.bool_)
    high[ends - 1] = True
    return _field(low.reshape(-1)) + _field(high)


def unpack_gaps(data: memoryview, count: int, *, bits: int, size: int) -> NDArray[np.int64]:
    """Decode gaps.

    Args:
        data: The bytes.
        count: The number of gaps.
        bits: The number of their low bits.
        size: The number of entries that they lie in, below 2^31.

    Returns:
        The gaps [count] int64, each at least 0.

    Raises:
        CodecError: "bad_header" or "bad_indices" for bytes that pack_gaps would not write.
    """
    if bits > MAX_BITS or count > size:
        raise CodecError("bad_header", f"{count} gaps of {bits} low bits in {size} entries")
    # A gap is a run of zeros, which a few bytes can make long. The sum of the gaps is bounded by `size`, and so is the
    # message: check its length before expanding it to bits.
    middle = -(-count * bits // 8)
    if not middle <= len(data) <= largest_size(count, size, bits):
        raise CodecError("bad_indices", f"{len(data)} bytes of {count} gaps")
    ones = np.flatnonzero(np.unpackbits(np.frombuffer(data[middle:], np.uint8), bitorder="little"))
    if ones.size != count or len(data) - middle != (int(ones[-1]) // 8 + 1 if count else 0):
        raise CodecError("bad_indices", f"{ones.size} gaps instead of {count}")
    gaps = (np.diff(ones, prepend=-1) - 1) << bits
    low = np.unpackbits(np.frombuffer(data[:middle], np.uint8), count=count * bits, bitorder="little")
    for j, plane in enumerate(low.reshape(count, bits).T):
        gaps |= plane.astype(np.int64) << j
    return gaps


def _field(flags: NDArray[np.bool_]) -> bytes:
    return np.packbits(flags, bitorder="little").tobytes()
