"""A key stream with random access: AES-256 in counter mode.

The random bytes follow from a key, and can be read from any place.
"""

import hashlib
import hmac
from collections.abc import Iterable

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from numpy.typing import NDArray

SECRET_BYTES = 32
"""How many bytes of the operating system's random numbers a secret has."""

_BLOCK_BYTES = 16
_WORD_BYTES = 8


class KeyStream:
    """An endless sequence of pseudorandom bytes.

    Nobody without the key can tell them from random ones.

    Args:
        key: a secret, or a public seed if everybody may know the sequence.
        context: the purpose of the sequence; another context gives an independent sequence.
    """

    def __init__(self, key: bytes, context: Iterable[str]) -> None:
        parts = b"".join(len(part).to_bytes(4, "big") + part for part in (text.encode() for text in context))
        self._key = hmac.digest(key, parts, hashlib.sha256)

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes from `start` to `stop` of the sequence."""
        first, skipped = divmod(start, _BLOCK_BYTES)
        cipher = Cipher(AES(self._key), CTR(first.to_bytes(_BLOCK_BYTES, "big"))).encryptor()
        return cipher.update(bytes(skipped + stop - start))[skipped:]

    def words(self, start: int, stop: int) -> NDArray[np.uint64]:
        """Return the 64-bit words from `start` to `stop`, [stop - start]."""
        return np.frombuffer(self.read(start * _WORD_BYTES, stop * _WORD_BYTES), "<u8")


def check_secret(secret: bytes) -> None:
    """Check that a secret is long enough.

    Raises:
        ValueError: if it is shorter than 32 bytes.
    """
    if len(secret) < SECRET_BYTES:
        raise ValueError(f"a secret of {len(secret)} bytes is shorter than {SECRET_BYTES}")
