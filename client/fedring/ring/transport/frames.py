"""Frames as bytes; no I/O.

They are written with one copy of the payload, and read without a copy.

    0x0A n head | 0x12 m zeros | 0x1A varint payload        (peer.proto, message Frame)

The bytes before the payload are a multiple of 16, so that values of any dtype are aligned in a received message.
"""

import zlib
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from fedring.ring.errors import BadFrame
from fedring.rpc.varint import read_varint, varint
from fedring.v1 import peer_pb2 as pb

Bytes = bytes | memoryview

MAX_PAYLOAD = 4 << 20
MAX_MESSAGE = 8 << 20
"""The limit of streams between workers alone; every other stream keeps gRPC's 4 MiB."""
GRPC_PREFIX = 5
"""Bytes that gRPC puts before a message."""
FRAME_BYTES = 1024
"""Bytes of memory that a received frame takes besides its payload, at most."""

_HEAD, _PADDING, _PAYLOAD = 0x0A, 0x12, 0x1A  # field number << 3 | 2
_ALIGN = 16
_MAX_HEAD = 127  # so that its length is one byte
_TEXTS = 74  # characters of a head's texts, all ASCII, beside which the largest numbers of a first part fit


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """A frame as it was received."""

    head: pb.Head
    payload: memoryview  # of bytes

    @property
    def cost(self) -> int:
        """Bytes of memory that the frame takes, estimated from above."""
        return FRAME_BYTES + len(self.payload)

    @property
    def what(self) -> str:
        """The sender's description of the operation, for errors.

        It is "" if there is none, or if it cannot be printed.
        """
        return self.head.what if self.head.what.isprintable() else ""


def fitting_what(what: str, key: str) -> str:
    """Return an operation's description, cut to fit a frame's head.

    The operation's key takes part of the same space.
    """
    return what[: _TEXTS - len(key)]


def write(head: pb.Head, payload: Bytes = b"", *, checksum: bool = False) -> bytes:
    """Return a frame's bytes. The payload is copied once.

    Args:
        head: The frame's head; gets the checksum, if there is one.
        payload: At most MAX_PAYLOAD bytes.
        checksum: Whether the frame carries a CRC-32 of head and payload.
    """
    packed = head.SerializeToString()
    if checksum:
        head.checksum = zlib.crc32(payload, zlib.crc32(packed))
        packed = head.SerializeToString()
    length = varint(len(payload))
    unpadded = 2 + len(packed) + 2 + 1 + len(length)
    padding = bytes(-unpadded % _ALIGN)
    return b"".join(
        (bytes((_HEAD, len(packed))), packed, bytes((_PADDING, len(padding))), padding, b"\x1a", length, payload)
    )


def read(data: bytes) -> Frame:
    """Parse a frame: the inverse of `write`.

    Raises:
        BadFrame: `write` cannot have made it, or its checksum does not match.
    """
    view = memoryview(data)
    head, at = _field(view, 0, _HEAD)
    padding, at = _field(view, at, _PADDING)
    payload, at = _field(view, at, _PAYLOAD)
    if at != len(data) or len(head) > _MAX_HEAD or len(padding) >= _ALIGN or len(payload) > MAX_PAYLOAD:
        raise BadFrame(f"a message of {len(data)} bytes is not laid out as a frame")
    try:
        parsed = pb.Head.FromString(bytes(head))
    except DecodeError as error:
        raise BadFrame("the head of a frame cannot be parsed") from error
    if parsed.HasField("checksum"):
        _check(parsed, payload)
    return Frame(parsed, payload)


def _check(head: pb.Head, payload: memoryview) -> None:
    """Raise BadFrame unless the frame's checksum is right.

    It covers the head without the checksum, and the payload.
    """
    bare = pb.Head()
    bare.CopyFrom(head)
    bare.ClearField("checksum")
    if head.checksum != zlib.crc32(payload, zlib.crc32(bare.SerializeToString())):
        raise BadFrame(f"frame {head.sequence} was corrupted on the way")


def _field(view: memoryview, at: int, tag: int) -> tuple[memoryview, int]:
    """Return the content and the end of the field at `at`."""
    if at >= len(view) or view[at] != tag:
        raise BadFrame(f"a frame of {len(view)} bytes has no field {tag >> 3} at {at}")
    length, start = read_varint(view, at + 1)
    if length < 0 or start + length > len(view):
        raise BadFrame(f"a frame of {len(view)} bytes is cut off in field {tag >> 3}")
    return view[start : start + length], start + length
