"""Masks: integers modulo 2^bits that follow from a seed, and how masked values are packed into bytes.

The words of a mask are the key stream of AES-256 in counter mode, so that each part of it can be made on its own.
FORMATS.md, "Secure aggregation", describes the bytes.
"""

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from numpy.typing import NDArray

MAX_BITS = 32
"""The most bits of a masked value."""

GROUP = 16
"""Pieces of masks and of packed values begin at multiples of this many values."""

_EIGHT = 8

Words = NDArray[np.uint8] | NDArray[np.uint16] | NDArray[np.uint32]
"""Masked values: unsigned integers of the fewest bytes that hold them."""


def word_type(bits: int) -> np.dtype[np.unsignedinteger]:
    """Return the little-endian type of a value of so many bits, 1 to 32."""
    if not 1 <= bits <= MAX_BITS:
        raise ValueError(f"{bits} bits are not 1 to {MAX_BITS}")
    return np.dtype("u1" if bits <= 8 else "<u2" if bits <= 16 else "<u4")


def mask(seed: bytes, bits: int, start: int, stop: int) -> Words:
    """Return the values from `start` to `stop` of a mask, [stop - start], of which the lowest `bits` bits count.

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
    """Return values modulo 2^bits as words of their own, [n]; higher bits of the words are not defined."""
    return values.astype(word_type(bits))


def unwrap(words: Words, bits: int) -> NDArray[np.int64]:
    """Return the integers from -2^(bits-1) to 2^(bits-1) - 1 that are equal to words modulo 2^bits, [n]."""
    values = words.astype(np.int64)
    values &= (1 << bits) - 1
    values -= (values >> (bits - 1)) << bits
    return values


def packed_size(count: int, bits: int) -> int:
    """Return the bytes of `count` packed values: each 8 values take `bits` bytes, and so does a rest of fewer."""
    return -(-count // _EIGHT) * bits


def pack(words: Words, bits: int) -> NDArray[np.uint8]:
    """Return the bytes of words, [packed_size(n, bits)]. The bits of the last 8 values that are not there are 0.

    Of each 8 values come first the lowest bytes of all, then the next ones, and last the bits above the last whole
    byte, as one little-endian number in which the first value has the lowest bits.
    """
    eights = -(-len(words) // _EIGHT)
    padded = words
    if len(words) % _EIGHT:
        padded = np.zeros(eights * _EIGHT, words.dtype)
        padded[: len(words)] = words
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
    """Return the `count` values that `pack` has written; `data` is packed_size(count, bits) long."""
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
