"""Dense payloads: fp32, fp16, bf16, int8 and, for buffers, fp64.

    HEADER (chunk = 0)   dim values, little endian
    HEADER   scales[ceil(dim / chunk)] f32   levels[dim] i8    for int8: levels in ±127, one scale a chunk

fp16 and bf16 round to nearest, ties to even. Finite values stay finite: those beyond the range of the format become its
largest.
"""

from math import isfinite
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from fedring.codec.chunks import dequantise, quantised_blocks
from fedring.codec.decoder import Decoder, square_of
from fedring.codec.errors import CodecError
from fedring.codec.source import HEADER, VERSION, Source, check_chunk, check_finite, check_length, read_only

FORMATS = {"fp32": (b"F4", "<f4"), "fp16": (b"H2", "<f2"), "bf16": (b"B2", "<u2"), "fp64": (b"F8", "<f8")}
"""By name, the magic and the dtype of the stored values."""

_INT8 = b"Q8"
_LARGEST_FP16 = np.float32(65504)
_LARGEST_BF16 = np.uint32(0x7F7F0000).view(np.float32)


def dense_header(name: str, dim: int) -> bytes:
    """Return the header of a dense payload.

    The `dim` values follow it as they are in memory.
    """
    return HEADER.pack(FORMATS[name][0], 0, VERSION, 0, dim)


def encode_dense(vector: NDArray[np.floating], name: str) -> bytes:
    """Encode a vector.

    Args:
        vector: The values [D], float32, or float64 for fp64.
        name: One of FORMATS.

    Raises:
        CodecError: "non_finite" if a value is NaN or infinite.
    """
    check_finite(vector)
    dtype = FORMATS[name][1]
    if name == "fp16":
        vector = vector.clip(-_LARGEST_FP16, _LARGEST_FP16)
    stored = _bf16(vector) if name == "bf16" else np.ascontiguousarray(vector, dtype)
    return b"".join((dense_header(name, vector.size), stored.data))


class DenseDecoder(Decoder):
    """An open payload of fp32, fp16, bf16 or fp64.

    Args:
        source: The bytes.
        name: The name of the format.
        length: The number of entries that the receiver expects.
    """

    seeks: ClassVar[bool] = True

    def __init__(self, source: Source, name: str, length: int) -> None:
        magic, dtype = FORMATS[name]
        zero, dim = source.header(HEADER, magic)
        if zero:
            raise CodecError("bad_header", f"chunk {zero} in a format that has none")
        check_length(dim, length)
        self._source = source
        self._name = name
        self._dtype = np.dtype(dtype)
        source.demand(HEADER.size + self._dtype.itemsize * dim)

    def decode(self, start: int, stop: int) -> NDArray[np.floating]:
        """See Decoder.decode; "non_finite" if a value is NaN or infinite."""
        values = self._values(start, stop)
        check_finite(values)
        return values

    def square(self, start: int, stop: int) -> float:
        """See Decoder.square; "non_finite" if a value is NaN or infinite."""
        values = self._values(start, stop)
        if not isfinite(square := square_of(values)):  # as it never is with a NaN or an infinity
            check_finite(values)
        return square

    def _values(self, start: int, stop: int) -> NDArray[np.floating]:
        """Return a range of values that may not be finite."""
        width = self._dtype.itemsize
        data = self._source.piece(HEADER.size + width * start, width * (stop - start))
        stored = np.frombuffer(data, self._dtype)
        match self._name:
            case "bf16":
                values = (stored.astype(np.uint32) << 16).view(np.float32)
            case "fp16":
                with np.errstate(invalid="ignore"):  # some processors warn of a signalling NaN, which is refused below
                    values = stored.astype(np.float32)
            case _:
                values = read_only(stored)
        return values


def encode_int8(vector: NDArray[np.float32], chunk: int) -> bytes:
    """Encode `vector` [D] float32; CodecError("non_finite") for NaN or infinity."""
    blocks = list(quantised_blocks(vector, chunk))
    header = HEADER.pack(_INT8, 0, VERSION, chunk, vector.size)
    scales = [scales.astype("<f4", copy=False).data for _, scales in blocks]
    return b"".join([header, *scales, *(levels.data for levels, _ in blocks)])


class Int8Decoder(Decoder):
    """An open payload of int8.

    Args:
        source: The bytes.
        length: The number of entries that the receiver expects.
    """

    seeks: ClassVar[bool] = True

    def __init__(self, source: Source, length: int) -> None:
        chunk, dim = source.header(HEADER, _INT8)
        self._chunk = check_chunk(chunk)
        check_length(dim, length)
        self._source = source
        self._levels = HEADER.size + 4 * -(-dim // chunk)
        source.demand(self._levels + dim)

    def decode(self, start: int, stop: int) -> NDArray[np.floating]:
        """See Decoder.decode; "bad_scale" if a scale could make a value infinite."""
        first, last = start // self._chunk, -(-stop // self._chunk)
        scales = self._source.floats(HEADER.size + 4 * first, max(0, last - first))
        levels = np.frombuffer(self._source.piece(self._levels + start, stop - start), np.int8)
        return dequantise(levels, scales, self._chunk, start - first * self._chunk)


def _bf16(vector: NDArray[np.floating]) -> NDArray[np.uint16]:
    """Return the upper halves of float32 patterns, rounded to nearest even."""
    bits = vector.astype(np.float32).clip(-_LARGEST_BF16, _LARGEST_BF16).view(np.uint32)
    bits += ((bits >> 16) & 1) + 0x7FFF
    return (bits >> 16).astype("<u2")
