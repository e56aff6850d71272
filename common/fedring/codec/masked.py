"""The packet masked: the integers modulo 2^bits of secure aggregation.

Each integer looks random, as a client of secure aggregation sends it.

    HEADER (chunk = bits, 1 to 32)   ceil(dim / 8) times `bits` bytes

It is no encoding of a vector: the number of values and their meaning follow from the round (FORMATS.md, "Secure
aggregation"). So a job cannot name it, and only a round with secure aggregation takes it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedring.codec.errors import CodecError
from fedring.codec.source import HEADER, VERSION, Reader, Source

MASKED = "masked"
"""The name of the packet's encoding."""

MAX_BITS = 32
"""The most bits of a masked value."""

_MAGIC = b"MK"
_EIGHT = 8

Words = NDArray[np.uint8] | NDArray[np.uint16] | NDArray[np.uint32]
"""Masked values: unsigned integers of the fewest bytes that hold them."""


def word_type(bits: int) -> np.dtype[np.unsignedinteger]:
    """Return the little-endian type of a value of `bits` bits.

    Raises:
        ValueError: If `bits` is not 1 to 32.
    """
    if not 1 <= bits <= MAX_BITS:
        raise ValueError(f"{bits} bits are not 1 to {MAX_BITS}")
    return np.dtype("u1" if bits <= 8 else "<u2" if bits <= 16 else "<u4")


@dataclass(frozen=True, slots=True)
class Width:
    """The number of values of a packet, and their bits."""

    count: int
    bits: int

    @property
    def bytes(self) -> int:
        """The size of the packet."""
        return HEADER.size + packed_size(self.count, self.bits)


class MaskedPacket:
    """An open packet.

    It holds no values: each range is read when it is asked for.

    Args:
        read: Returns the bytes at an offset, of a given size.
        size: The size of the packet in bytes.
        width: The width that the receiver expects.

    Raises:
        CodecError: "wrong_width", if the packet is of another width or size; "truncated" or "bad_header".
    """

    def __init__(self, read: Reader, size: int, width: Width) -> None:
        self._source, self._bits = Source(read, size), width.bits
        bits, count = self._source.header(HEADER, _MAGIC)
        if (count, bits, size) != (width.count, width.bits, width.bytes):
            found = f"{count} values of {bits} bits in {size} bytes"
            raise CodecError("wrong_width", f"{found}, and not {width.count} of {width.bits} in {width.bytes}")

    def words(self, start: int, stop: int) -> Words:
        """Return the values from `start` to `stop`, [stop - start].

        `start` is a multiple of 8.

        Raises:
            CodecError: "truncated", if bytes are missing.
        """
        offset = HEADER.size + start // _EIGHT * self._bits
        return unpack(self._source.piece(offset, packed_size(stop - start, self._bits)), stop - start, self._bits)


def masked_packet(words: Words, bits: int) -> list[bytes | memoryview]:
    """Return the parts of a packet, which follow each other.

    Args:
        words: The masked values [n]; only their lowest `bits` bits count.
        bits: Of a value.
    """
    return [HEADER.pack(_MAGIC, 0, VERSION, bits, len(words)), pack(words, bits).data]


def packed_size(count: int, bits: int) -> int:
    """Return the size in bytes of `count` packed values.

    Each 8 values take `bits` bytes, and so does a rest of fewer than 8.
    """
    return -(-count // _EIGHT) * bits


def pack(words: Words, bits: int) -> NDArray[np.uint8]:
    """Return words packed to `bits` bits, [packed_size(n, bits)] uint8.

    If n is not a multiple of 8, the missing values of the last 8 are 0. Of each 8 values come first the lowest bytes of
    all, then the next ones, and last the bits above the last whole byte, as one little-endian number in which the first
    value has the lowest bits.
    """
    eights = -(-len(words) // _EIGHT)
    padded = words
    if len(words) % _EIGHT:
        padded = np.zeros(eights * _EIGHT, words.dtype)
        padded[: len(words)] = words
    # Equal bytes of 8 values lie together: whole bytes are copied as arrays, and only the top bits are shifted.
    planes = padded.view("u1").reshape(eights, _EIGHT, words.itemsize)
    out = np.empty((eights, bits), "u1")
    whole, rest = divmod(bits, 8)
    for plane in range(whole):
        out[:, plane * _EIGHT : (plane + 1) * _EIGHT] = planes[:, :, plane]
    if rest:
        top = np.zeros(eights, "<u8")
        for index in range(_EIGHT):
            value = planes[:, index, whole].astype("<u8")
            value &= np.uint64((1 << rest) - 1)
            top |= value << np.uint64(index * rest)
        out[:, whole * _EIGHT :] = top.view("u1").reshape(eights, 8)[:, :rest]
    return out.reshape(-1)


def unpack(data: bytes | memoryview, count: int, bits: int) -> Words:
    """Return the `count` values packed in `data`, the inverse of `pack`.

    `data` is packed_size(count, bits) long.
    """
    kind = word_type(bits)
    eights = -(-count // _EIGHT)
    rows = np.frombuffer(data, "u1").reshape(eights, bits)
    words = np.zeros((eights, _EIGHT, kind.itemsize), "u1")
    whole, rest = divmod(bits, 8)
    for plane in range(whole):
        words[:, :, plane] = rows[:, plane * _EIGHT : (plane + 1) * _EIGHT]
    if rest:
        wide = np.zeros((eights, 8), "u1")
        wide[:, :rest] = rows[:, whole * _EIGHT :]
        top = wide.view("<u8").reshape(eights)
        for index in range(_EIGHT):
            words[:, index, whole] = (top >> np.uint64(index * rest)) & np.uint64((1 << rest) - 1)
    return words.reshape(-1).view(kind)[:count]
