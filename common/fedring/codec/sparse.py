"""Sparse payloads with indices that are not coded: fp32_sparse and sq8.

    S4   'S','4',0,1  dim u32  k u32             idx[k] u32                          values[k] f32
    SQ   'S','Q',0,1  dim u32  k u32  chunk u32  idx[k] u32  scales[ceil(k/chunk)] f32  levels[k] i8

Indices rise strictly. Every 4096th is read when a payload is opened, so that reading a range costs as much as the
entries in it, and an open payload takes hardly any memory.
"""

import struct
from math import ceil

import numpy as np
from numpy.typing import NDArray

from fedring.codec.chunks import dequantise, quantise
from fedring.codec.decoder import SparseDecoder
from fedring.codec.encoding import Encoding
from fedring.codec.errors import CodecError
from fedring.codec.select import largest
from fedring.codec.source import VERSION, Source, check_chunk, check_finite, check_length

_S4 = struct.Struct("<2sBBII")
_SQ = struct.Struct("<2sBBIII")
_FENCE = 4096  # an open payload remembers one index in so many


def kept(vector: NDArray[np.float32], keep_ratio: float) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return indices and values of the largest magnitudes of `vector` [D].

    They are max(1, ceil(keep_ratio D)) entries; zeros among them are left out.
    """
    indices = largest(vector, max(1, ceil(keep_ratio * vector.size)))
    values = vector[indices]
    check_finite(values)  # a value that is not finite is among the largest
    return indices, values


def encode_sparse(vector: NDArray[np.float32], encoding: Encoding) -> bytes:
    """Encode the largest entries of a vector as fp32_sparse or sq8.

    Args:
        vector: The values [D] float32, D < 2^32.
        encoding: Has the share of the entries to keep, and how many of them share a scale.

    Raises:
        CodecError: "bad_encoding" if the vector is too long, "non_finite" if a value is NaN or infinite.
    """
    if vector.size >= 1 << 32:
        raise CodecError("bad_encoding", f"{encoding.name} holds fewer than 2^32 entries, not {vector.size}")
    indices, values = kept(vector, encoding.keep_ratio)
    where = indices.astype("<u4").data
    if encoding.name == "fp32_sparse":
        header = _S4.pack(b"S4", 0, VERSION, vector.size, indices.size)
        return b"".join((header, where, values.astype("<f4", copy=False).data))
    header = _SQ.pack(b"SQ", 0, VERSION, vector.size, indices.size, encoding.chunk)
    levels, scales = quantise(values, encoding.chunk)
    return b"".join((header, where, scales.astype("<f4", copy=False).data, levels.data))


class IndexedDecoder(SparseDecoder):
    """An open payload of fp32_sparse or sq8.

    Args:
        source: The bytes.
        name: The name of the format.
        length: The number of entries that the receiver expects.
    """

    def __init__(self, source: Source, name: str, length: int) -> None:
        layout, magic = (_S4, b"S4") if name == "fp32_sparse" else (_SQ, b"SQ")
        dim, count, *chunks = source.header(layout, magic)
        check_length(dim, length)
        if count > dim:
            raise CodecError("bad_header", f"{count} of {dim} entries")
        self._chunk = check_chunk(chunks[0]) if chunks else 0
        self._source = source
        self._dim, self._count = dim, count
        self._indices = layout.size
        self._scales = self._values = layout.size + 4 * count
        if self._chunk:
            self._values += 4 * -(-count // self._chunk)
        source.demand(self._values + (1 if self._chunk else 4) * count)
        self._fence = self._read_fence()

    def entries(self, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """See SparseDecoder.entries."""
        first = max(0, int(np.searchsorted(self._fence, start, "right")) - 1)
        last = max(first, int(np.searchsorted(self._fence, stop, "left")))
        indices = self._read_indices(first, last)
        low, high = np.searchsorted(indices, (start, stop)).tolist()
        positions = indices[low:high].astype(np.int64) - start
        return positions, self._read_values(first * _FENCE + low, high - low)

    def _read_fence(self) -> NDArray[np.uint32]:
        data = b"".join(self._source.piece(self._indices + 4 * i, 4) for i in range(0, self._count, _FENCE))
        fence = np.frombuffer(data, "<u4")
        _check_rising(fence, self._dim)
        return fence

    def _read_indices(self, first: int, last: int) -> NDArray[np.uint32]:
        """Return the indices between fence posts, checked to rise strictly.

        They are those from post `first` to the one before post `last`.
        """
        low, high = first * _FENCE, min(last * _FENCE, self._count)
        indices = np.frombuffer(self._source.piece(self._indices + 4 * low, 4 * (high - low)), "<u4")
        _check_rising(indices, int(self._fence[last]) if last < len(self._fence) else self._dim)
        return indices

    def _read_values(self, start: int, count: int) -> NDArray[np.float32]:
        """Return the values of the kept entries start..start+count."""
        if not self._chunk:
            values = self._source.floats(self._values + 4 * start, count)
            check_finite(values)
            return values
        first, last = start // self._chunk, -(-(start + count) // self._chunk)
        scales = self._source.floats(self._scales + 4 * first, last - first)
        levels = np.frombuffer(self._source.piece(self._values + start, count), np.int8)
        return dequantise(levels, scales, self._chunk, start - first * self._chunk)


def _check_rising(indices: NDArray[np.uint32], limit: int) -> None:
    """Check that `indices` rise strictly and stay below `limit`; else raise CodecError("bad_indices")."""
    if indices.size and (indices[-1] >= limit or not (indices[1:] > indices[:-1]).all()):
        raise CodecError("bad_indices")
