"""The values in gradient messages: fp32, fp16 or sign.

    fp32   values[count] f32
    fp16   exponent i8   halves[count] f16                 value = half / 2^exponent
    sign   scale u16   bit field of count flags            value = scale, or -scale where the flag is set

The exponent is common to all values and puts the largest magnitude below 2^15: no value overflows, however large or
small the gradients are. The scale is the mean magnitude, cut to the upper half of an f32. The rounding error of fp16 is
an f32, exactly; that of sign is one to within a rounding.
"""

import struct
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedring.codec.errors import CodecError
from fedring.codec.source import check_finite

Precision = Literal["fp32", "fp16", "sign"]

_PREFIX = {"fp32": 0, "fp16": 1, "sign": 2}
_SMALLEST_EXPONENT, _LARGEST_EXPONENT = -113, 100  # 2^-100 times a half is never below what an f32 resolves


@dataclass(frozen=True, slots=True, eq=False)
class Words:
    """Rounded values: their bytes, and their values after decoding."""

    precision: Precision
    data: bytes
    values: NDArray[np.float32]  # [count], as a receiver decodes `data`


def words_size(precision: Precision, count: int) -> int:
    """Return the size of `count` values in bytes."""
    width = {"fp32": 32, "fp16": 16, "sign": 1}[precision]
    return _PREFIX[precision] + -(-count * width // 8)


def to_words(values: NDArray[np.float32], precision: Precision) -> Words:
    """Round values to a precision.

    Args:
        values: The values [count] float32. NaN and infinity are not changed, so that every receiver refuses them.
        precision: The precision.
    """
    if precision == "fp32":
        data = values.astype("<f4", copy=False).tobytes()
        return Words(precision, data, np.frombuffer(data, "<f4"))
    if precision == "fp16":
        data = _to_halves(values)
        return Words(precision, data, _from_halves(memoryview(data)))
    data = _to_signs(values)
    return Words(precision, data, _from_signs(memoryview(data), values.size))


def from_words(precision: Precision, data: memoryview, count: int) -> NDArray[np.float32]:
    """Decode values.

    Args:
        data: The bytes.
        count: The number of values.
        precision: Their precision.

    Returns:
        The values [count] float32, all finite.

    Raises:
        CodecError: "wrong_size", "bad_scale" or "non_finite" for other bytes.
    """
    if len(data) != words_size(precision, count):
        raise CodecError("wrong_size", f"{len(data)} bytes of {count} values as {precision}")
    if precision == "fp32":
        values = np.frombuffer(data, "<f4")
    elif precision == "fp16":
        values = _from_halves(data)
    else:
        values = _from_signs(data, count)
    check_finite(values)
    return values


def _to_halves(values: NDArray[np.float32]) -> bytes:
    peak = np.abs(values).max(initial=0)
    exponent = 15 - int(np.frexp(peak)[1]) if peak > 0 and np.isfinite(peak) else 0
    exponent = min(max(exponent, _SMALLEST_EXPONENT), _LARGEST_EXPONENT)
    with np.errstate(over="ignore"):  # only next to NaN or infinity, and then receivers refuse the message
        halves = np.ldexp(values, exponent).astype("<f2")
    return struct.pack("<b", exponent) + halves.tobytes()


def _from_halves(data: memoryview) -> NDArray[np.float32]:
    (exponent,) = struct.unpack_from("<b", data)
    halves = np.frombuffer(data, "<f2", offset=1).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # an overflow and a signalling NaN are refused as not finite
        values: NDArray[np.float32] = np.ldexp(halves, -exponent)
    return values


def _to_signs(values: NDArray[np.float32]) -> bytes:
    mean = np.float32(np.abs(values).mean(dtype=np.float64)) if values.size else np.float32(0)
    return struct.pack("<H", int(mean.view(np.uint32)) >> 16) + np.packbits(values < 0, bitorder="little").tobytes()


def _from_signs(data: memoryview, count: int) -> NDArray[np.float32]:
    (upper,) = struct.unpack_from("<H", data)
    if upper >> 15:
        raise CodecError("bad_scale", "a negative scale")
    scale = np.uint32(upper << 16).view(np.float32)
    negative = np.unpackbits(np.frombuffer(data, np.uint8, offset=2), count=count, bitorder="little").view(np.bool_)
    return np.where(negative, -scale, scale)
