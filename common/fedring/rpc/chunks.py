"""Long payloads in chunks, with few copies.

They are cut, written to the wire with one copy, and read from it without any. A ModelBlob and a ClientUpdate that carry
a chunk are the same bytes, because the chunk is field 2 of both:

    0x12 length | 0x08 offset (absent if 0) | 0x12 length data

Messages of this form are written and read here, without protobuf. Protobuf reads and writes all others.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.message import Message

from fedring.rpc.varint import read_varint, varint

CHUNK_BYTES = 1 << 20
"""The most bytes of data in one chunk. The whole message stays far below 2 MiB."""

_M = TypeVar("_M", bound=Message)
_CHUNK, _OFFSET, _DATA = 0x12, 0x08, 0x12  # field number << 3 | wire type


@dataclass(frozen=True, slots=True)
class ReceivedChunk:
    """A chunk whose data lies in the received bytes, uncopied."""

    offset: int  # of the data in the payload, in bytes
    data: memoryview


def chunks(read: Callable[[int, int], bytes | memoryview], *, start: int, total: int) -> Iterator[tuple[int, bytes]]:
    """Cut the bytes [start, total) of a payload into chunks.

    Args:
        read: Returns the `size` bytes of the payload at `offset`, when called with (offset, size).
        start: The offset of the first byte to send.
        total: The length of the payload in bytes.

    Yields:
        Each chunk's offset, and the serialised message that carries it, in order.
    """
    for offset in range(start, total, CHUNK_BYTES):
        yield offset, chunk_message(offset, read(offset, min(CHUNK_BYTES, total - offset)))


def chunk_message(offset: int, data: bytes | memoryview) -> bytes:
    """Return a serialised ModelBlob or ClientUpdate with a chunk.

    Args:
        data: The chunk.
        offset: Its offset in the payload.
    """
    head = (bytes((_OFFSET,)) + varint(offset) if offset else b"") + bytes((_DATA,)) + varint(len(data))
    return b"".join((bytes((_CHUNK,)), varint(len(head) + len(data)), head, data))


def part_parser(kind: type[_M]) -> Callable[[bytes], _M | ReceivedChunk]:
    """Return a deserializer for ModelBlob or ClientUpdate.

    Args:
        kind: The class of the message.

    Returns:
        A function of the message's bytes. It returns a ReceivedChunk for a chunk in the form above, and a message of
        `kind` for anything else.
    """

    def parse(data: bytes) -> _M | ReceivedChunk:
        return _parse_chunk(data) or kind.FromString(data)

    return parse


def serialize(message: Any) -> bytes:
    """Return the bytes of a message; bytes are returned as they are."""
    data: bytes = message if isinstance(message, bytes) else message.SerializeToString()
    return data


def _parse_chunk(data: bytes) -> ReceivedChunk | None:
    if not data or data[0] != _CHUNK:
        return None
    length, at = read_varint(data, 1)
    if at + length != len(data) or at == len(data):
        return None
    offset = 0
    if data[at] == _OFFSET:
        offset, at = read_varint(data, at + 1)
    if at >= len(data) or data[at] != _DATA:
        return None
    length, at = read_varint(data, at + 1)
    return ReceivedChunk(offset, memoryview(data)[at:]) if at + length == len(data) else None
