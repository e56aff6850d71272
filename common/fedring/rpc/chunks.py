"""Long payloads as chunks: cut, put on the wire with one copy, read from it with none.

A ModelBlob and a ClientUpdate that carry a chunk are the same bytes, since both have it as field 2:

    0x12 length | 0x08 offset (absent if 0) | 0x12 length data

They are written and, in this form, read here. Everything else is left to protobuf.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.message import Message

from fedring.rpc.varint import read_varint, varint

CHUNK_BYTES = 1 << 20
"""Most bytes of data in one chunk; with its header a message stays far below 2 MiB."""

_M = TypeVar("_M", bound=Message)
_CHUNK, _OFFSET, _DATA = 0x12, 0x08, 0x12  # field number << 3 | wire type


@dataclass(frozen=True, slots=True)
class Piece:
    """A chunk as it came."""

    offset: int
    data: memoryview


def chunks(read: Callable[[int, int], bytes | memoryview], *, start: int, total: int) -> Iterator[tuple[int, bytes]]:
    """The bytes [start, total) of a payload, in order: each chunk's offset, and the message that carries it."""
    for offset in range(start, total, CHUNK_BYTES):
        yield offset, chunk_message(offset, read(offset, min(CHUNK_BYTES, total - offset)))


def chunk_message(offset: int, data: bytes | memoryview) -> bytes:
    """A serialised ModelBlob or ClientUpdate with a chunk."""
    head = (bytes((_OFFSET,)) + varint(offset) if offset else b"") + bytes((_DATA,)) + varint(len(data))
    return b"".join((bytes((_CHUNK,)), varint(len(head) + len(data)), head, data))


def part_parser(kind: type[_M]) -> Callable[[bytes], _M | Piece]:
    """A deserializer of ModelBlob or ClientUpdate: a Piece for a chunk in the form above, else a message."""

    def parse(data: bytes) -> _M | Piece:
        return _parse_piece(data) or kind.FromString(data)

    return parse


def serialize(message: Any) -> bytes:
    """The message's bytes, which it may be already."""
    data: bytes = message if isinstance(message, bytes) else message.SerializeToString()
    return data


def _parse_piece(data: bytes) -> Piece | None:
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
    return Piece(offset, memoryview(data)[at:]) if at + length == len(data) else None
