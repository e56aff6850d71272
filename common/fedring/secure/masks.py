"""Masks: integers modulo 2^bits that follow from a seed.

The words of a mask are the key stream of AES-256 in counter mode, so that each part of it can be made on its own.
FORMATS.md, "Secure aggregation", describes the bytes.
"""

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from numpy.typing import NDArray

from fedring.codec.masked import MAX_BITS, Words, pack, packed_size, unpack, word_type

GROUP = 16
"""Pieces of masks begin at multiples of this many values."""

__all__ = ["GROUP", "MAX_BITS", "Words", "mask", "pack", "packed_size", "unpack", "unwrap", "word_type", "wrap"]


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
