"""Streams that are never late, and what they weigh."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.message import Message

from fedring.rpc.errors import Gone, Stalled

_T = TypeVar("_T")
_WRITE_GRACE = 0.5  # seconds that a write still has when its call is to end
GRPC_PREFIX = 5  # compressed flag and length, before every message on the wire


@dataclass(slots=True)
class Meter:
    """The bytes of one call's messages, as they are on the wire, with gRPC's own prefix."""

    received: int = 0
    sent: int = 0

    def receiving(self, parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
        """`parse`, counted."""

        def count(data: bytes) -> Any:
            self.received += len(data) + GRPC_PREFIX
            return parse(data)

        return count

    def sending(self, serialize: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
        """`serialize`, counted."""

        def count(message: Any) -> bytes:
            data = serialize(message)
            self.sent += len(data) + GRPC_PREFIX
            return data

        return count


METER: ContextVar[Meter] = ContextVar("METER")
"""The meter of the call that the running handler serves."""


def wire_bytes(message: Message | bytes) -> int:
    """What a small message takes on the wire; of a large one, count the bytes that were sent."""
    return (len(message) if isinstance(message, bytes) else message.ByteSize()) + GRPC_PREFIX


class Paced(AsyncIterator[_T]):
    """The messages of a stream; Stalled when none comes for `seconds`."""

    def __init__(self, messages: AsyncIterator[_T], seconds: float) -> None:
        self._messages, self._seconds = messages, seconds

    async def __anext__(self) -> _T:
        try:
            async with asyncio.timeout(self._seconds):
                return await anext(self._messages)
        except TimeoutError as error:
            raise Stalled(f"nothing came for {self._seconds:g} s") from error


async def write(context: Any, message: Any, seconds: float) -> None:
    """The message is on its way; Stalled if the caller reads nothing for so long, Gone if it is not there."""
    try:
        async with asyncio.timeout(seconds):
            await finish_write(context, message)
    except TimeoutError:
        raise Stalled(f"the caller read nothing for {seconds:g} s") from None


async def finish_write(context: Any, message: Any) -> None:
    """Write the message; if cancelled, wait a moment for the write that has begun. Gone if the caller is not there."""
    writing = asyncio.ensure_future(context.write(message))
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        # grpc does not stop what it has begun to write, and loses a status that is sent before that has ended.
        with suppress(Exception):
            await asyncio.wait_for(writing, _WRITE_GRACE)
        raise
    except Exception as error:  # grpc has no public name for a write to a stream that is dead
        raise Gone("the caller went away") from error
