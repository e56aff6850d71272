"""A payload's bytes, and the checks that all decoders share."""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from fedring.codec.encoding import TILE
from fedring.codec.errors import CodecError

Reader = Callable[[int, int], bytes | memoryview]
"""Takes an offset and a size, and returns the bytes there; fewer if the source ends before."""

HEADER = struct.Struct("<2sBBIQ")
"""Magic, 0, version, chunk (0 where a format has none), dim: every format but S4 and SQ."""

VERSION = 1

_Scalar = TypeVar("_Scalar", bound=np.generic)


@dataclass(frozen=True, slots=True)
class Source:
    """The `size` bytes of one payload, which `read` returns piece by piece."""

    read: Reader
    size: int

    def piece(self, offset: int, size: int) -> memoryview:
        """Return exactly `size` bytes at `offset`; CodecError("truncated") if there are fewer."""
        data = memoryview(self.read(offset, size))
        if len(data) != size:
            raise CodecError("truncated", f"{len(data)} of {size} bytes at {offset}")
        return data

    def floats(self, offset: int, count: int) -> NDArray[np.float32]:
        """Return the `count` float32 values at `offset`, [count], read-only."""
        return read_only(np.frombuffer(self.piece(offset, 4 * count), "<f4"))

    def header(self, layout: struct.Struct, magic: bytes) -> tuple[int, ...]:
        """Return the fields that follow magic, zero and version in the header.

        Args:
            layout: The layout of the whole header.
            magic: The first two bytes of the format.

        Raises:
            CodecError: "truncated" or "bad_header".
        """
        if self.size < layout.size:
            raise CodecError("truncated", f"{self.size} of {layout.size} header bytes")
        got, zero, version, *rest = layout.unpack(self.piece(0, layout.size))
        if (got, zero, version) != (magic, 0, VERSION):
            raise CodecError("bad_header", f"expected {magic!r} 0 {VERSION}, got {got!r} {zero} {version}")
        return tuple(rest)

    def demand(self, size: int) -> None:
        """Check that the payload has exactly `size` bytes.

        Raises:
            CodecError: "truncated" or "wrong_size".
        """
        if self.size < size:
            raise CodecError("truncated", f"{self.size} of {size} bytes")
        if self.size > size:
            raise CodecError("wrong_size", f"{self.size} bytes where the header demands {size}")


def check_length(got: int, expected: int) -> None:
    """Check that a header's dim is the expected number of entries.

    Raises:
        CodecError: "wrong_length".
    """
    if got != expected:
        raise CodecError("wrong_length", f"expected {expected} entries, got {got}")


def check_chunk(chunk: int) -> int:
    """Return `chunk` if it is in 1..TILE; else raise CodecError("bad_header")."""
    if not 1 <= chunk <= TILE:
        raise CodecError("bad_header", f"chunk {chunk} is not in 1..{TILE}")
    return chunk


def check_finite(values: NDArray[np.floating]) -> None:
    """Check that no value is NaN or infinite; else raise CodecError("non_finite")."""
    if not np.isfinite(values).all():
        raise CodecError("non_finite")


def read_only(values: NDArray[_Scalar]) -> NDArray[_Scalar]:
    """Return `values` after making the array read-only."""
    values.flags.writeable = False
    return values
