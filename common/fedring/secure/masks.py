"""Masks, integers under them, and the packet that carries these.

A mask is integers modulo 2^bits that follow from a seed. Its words are the key stream of AES-256 in counter mode, so
that each part of it can be made on its own. The packet holds integers that look random, as clients send them:

    HEADER (chunk = bits, 1 to 32)   ceil(dim / 8) times `bits` bytes

It is no encoding of a vector: the number of values and their meaning follow from the round. So a job cannot name it.
FORMATS.md, "Secure aggregation", describes all bytes.
"""

from dataclasses import dataclass

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from numpy.typing import NDArray

from fedring.codec.errors import CodecError
from fedring.codec.source import HEADER, VERSION, Reader, Source

GROUP = 16
"""Pieces of masks begin at multiples of this many values."""

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


def mask(seed: bytes, bits: int, start: int, stop: int) -> Words:
    """Return the mask's values from `start` to `stop`, [stop - start].

    Only the lowest `bits` bits of a value count.

    Args:
        seed: 32 bytes, used for one mask only.
        bits: of a value.
        start: a multiple of GROUP.
        stop: where the piece ends.
    """
    if start % GROUP:
        raise ValueError(f"{start} is not a multiple of {GROUP}")
    kind = word_type(bits)
    first = start * kind.itemsize // 16  # the place of its first block of AES
    stream = Cipher(AES(seed), CTR(first.to_bytes(16, "big"))).encryptor()
    return np.frombuffer(stream.update(bytes((stop - start) * kind.itemsize)), kind)


def wrap(values: NDArray[np.signedinteger], bits: int) -> Words:
    """Return values modulo 2^bits as words of their own, [n].

    Higher bits of the words are not defined.
    """
    return values.astype(word_type(bits))


def unwrap(words: Words, bits: int) -> NDArray[np.int64]:
    """Return the signed integers of words modulo 2^bits, [n].

    They are from -2^(bits-1) to 2^(bits-1) - 1.
    """
    values = words.astype(np.int64)
    values &= (1 << bits) - 1
    values -= (values >> (bits - 1)) << bits
    return values


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
