"""Payloads that consist of independently coded segments: packed and uniform.

    HEADER   sizes[segments] u32   segment 0, segment 1, ...

A segment covers TILE entries, rounded down to a multiple of chunk; the last one covers the rest. Inside it, a
compressed stream is its size u32 and one zstandard frame that states the size of its content; an empty stream is the
size 0 alone.
"""

import struct
from collections.abc import Iterator

import numpy as np
import zstandard
from numpy.typing import NDArray

from fedring.codec.encoding import TILE
from fedring.codec.errors import CodecError
from fedring.codec.source import HEADER, VERSION, Source, check_chunk, check_length, read_only

_LEVEL = 1  # higher levels look for repetitions, which levels and gaps do not have: slower, and hardly smaller
_SIZE = struct.Struct("<I")
_WINDOW = 1 << 22  # bytes, more than any stream of one segment needs


def span_of(chunk: int) -> int:
    """Return the number of entries that a segment covers."""
    return TILE // chunk * chunk


def join_segments(magic: bytes, chunk: int, length: int, segments: list[bytes]) -> bytes:
    """Return the payload that consists of `segments`.

    Args:
        magic: The first two bytes of the format.
        chunk: How many values share a scale.
        length: The length of the vector.
        segments: The bytes of each segment.
    """
    sizes = np.array([len(segment) for segment in segments], "<u4")
    return b"".join((HEADER.pack(magic, 0, VERSION, chunk, length), sizes.data, *segments))


class Segments:
    """The segments of an open payload.

    Only a table of their places is held in memory.

    Args:
        source: The bytes.
        magic: The first two bytes of the format.
        length: The number of entries that the receiver expects.
    """

    def __init__(self, source: Source, magic: bytes, length: int) -> None:
        chunk, dim = source.header(HEADER, magic)
        self.chunk = check_chunk(chunk)
        check_length(dim, length)
        self.span = span_of(chunk)
        self._source = source
        self._dim = dim
        count = -(-dim // self.span)
        table = HEADER.size + 4 * count
        if source.size < table:
            raise CodecError("truncated", f"{source.size} of {table} bytes of header and table")
        sizes = np.frombuffer(source.piece(HEADER.size, 4 * count), "<u4")
        if sizes.size and sizes.max() > 8 * self.span + 1024:  # bounds a receiver's memory
            raise CodecError("bad_header", f"a segment of {sizes.max()} bytes, more than any sender needs")
        self._ends = np.cumsum(sizes, dtype=np.int64) + table
        source.demand(int(self._ends[-1]) if count else table)
        self._sizes = sizes.tobytes()  # a copy, so that the source can free its memory

    def covering(self, start: int, stop: int) -> Iterator[tuple["Segment", int, int]]:
        """Yield the segments that hold entries of start..stop.

        Each comes with its first entry and the one after its last.
        """
        if start >= stop:
            return
        for number in range(start // self.span, -(-stop // self.span)):
            (size,) = _SIZE.unpack_from(self._sizes, 4 * number)
            data = self._source.piece(int(self._ends[number]) - size, size)
            low = number * self.span
            yield Segment(data), low, min(low + self.span, self._dim)


class Segment:
    """The bytes of one segment, taken from front to end."""

    def __init__(self, data: memoryview) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def take(self, size: int) -> memoryview:
        """Take the next `size` bytes; CodecError("truncated") if there are fewer."""
        if size > len(self._data):
            raise CodecError("truncated", f"{len(self._data)} of {size} bytes in a segment")
        taken, self._data = self._data[:size], self._data[size:]
        return taken

    def number(self) -> int:
        """Take the next u32."""
        (value,) = _SIZE.unpack(self.take(4))
        return int(value)

    def floats(self, count: int) -> NDArray[np.float32]:
        """Take the next `count` float32 values [count], read-only."""
        return read_only(np.frombuffer(self.take(4 * count), "<f4"))

    def stream(self, size: int) -> NDArray[np.uint8]:
        """Take the next compressed stream; return its content [size] uint8.

        Raises:
            CodecError: If the content is not `size` bytes.
        """
        return np.frombuffer(_expand(self.take(self.number()), size), np.uint8)

    def end(self) -> None:
        """Check that nothing is left; else raise CodecError("wrong_size")."""
        if self._data:
            raise CodecError("wrong_size", f"{len(self._data)} bytes after a segment's end")


def stream(content: NDArray[np.uint8]) -> bytes:
    """Compress `content` [n] uint8, and return it as a stream."""
    frame = zstandard.ZstdCompressor(level=_LEVEL).compress(content.data) if content.size else b""
    return _SIZE.pack(len(frame)) + frame


def pack_bits(flags: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Return flags [n] packed eight to a byte, [ceil(n / 8)].

    The first flag is in the lowest bit.
    """
    return np.packbits(flags, bitorder="little")


def unpack_bits(data: memoryview | NDArray[np.uint8], count: int) -> NDArray[np.bool_]:
    """Return the flags [count] that `data`, ceil(count / 8) bytes, holds."""
    return np.unpackbits(np.frombuffer(data, np.uint8), count=count, bitorder="little").view(np.bool_)


def _expand(frame: memoryview, size: int) -> bytes:
    """Decompress a frame to exactly `size` bytes.

    The content never takes more memory than that, whatever the frame claims.
    """
    if not frame and size == 0:
        return b""
    try:
        claimed = zstandard.frame_content_size(frame)
        if claimed != size:
            raise CodecError("bomb" if claimed > size else "bad_compression", f"{claimed} bytes instead of {size}")
        content = zstandard.ZstdDecompressor(max_window_size=_WINDOW).decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CodecError("bad_compression", str(error)) from error
    if len(content) != size:
        raise CodecError("bad_compression", f"{len(content)} bytes instead of {size}")
    return content
