"""Long payloads as chunks: made from a reader, counted as they travel, never late."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TypeVar

from google.protobuf.message import Message

from fedring.rpc.errors import Stalled
from fedring.v1.federation_pb2 import Chunk

CHUNK_BYTES = 1 << 20
"""Most bytes of data in one chunk; with its header a message stays far below 2 MiB."""

_T = TypeVar("_T")
_GRPC_PREFIX = 5  # compressed flag and length, before every message on the wire


def chunks(read: Callable[[int, int], bytes | memoryview], *, start: int, total: int) -> Iterator[Chunk]:
    """The bytes [start, total) of a payload, in order."""
    for offset in range(start, total, CHUNK_BYTES):
        yield Chunk(offset=offset, data=bytes(read(offset, min(CHUNK_BYTES, total - offset))))


def wire_bytes(message: Message) -> int:
    """What `message` takes on the stream, with gRPC's own prefix."""
    return message.ByteSize() + _GRPC_PREFIX


async def paced(messages: AsyncIterator[_T], seconds: float) -> AsyncIterator[_T]:
    """The messages of a stream; Stalled when none comes for `seconds`."""
    while True:
        try:
            async with asyncio.timeout(seconds):
                message = await anext(messages)
        except StopAsyncIteration:
            return
        except TimeoutError as error:
            raise Stalled(f"nothing came for {seconds:g} s") from error
        yield message
