"""Deadlines and byte counters for gRPC streams."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.message import Message

from fedring.rpc.errors import Gone, Stalled

_T = TypeVar("_T")
WRITE_GRACE = 0.5
"""Seconds that a write may still take after its call was cancelled."""

GRPC_PREFIX = 5
"""Bytes that gRPC puts before every message: a flag for compression, and the length."""


@dataclass(slots=True)
class CallMeter:
    """Counts the bytes of one call's messages on the wire.

    gRPC's own prefix is included.
    """

    received: int = 0
    sent: int = 0

    def receiving(self, parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
        """Wrap a deserializer so that it counts its input bytes."""

        def count(data: bytes) -> Any:
            self.received += len(data) + GRPC_PREFIX
            return parse(data)

        return count

    def sending(self, serialize: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
        """Wrap a serializer so that it counts the bytes that it returns."""

        def count(message: Any) -> bytes:
            data = serialize(message)
            self.sent += len(data) + GRPC_PREFIX
            return data

        return count


METER: ContextVar[CallMeter] = ContextVar("METER")
"""The meter of the call that the running handler serves."""


def wire_bytes(message: Message | bytes) -> int:
    """Return the bytes that a small message takes on the wire.

    This serialises the message once more, so of large messages count the bytes that were sent instead.
    """
    return (len(message) if isinstance(message, bytes) else message.ByteSize()) + GRPC_PREFIX


class TimedStream(AsyncIterator[_T]):
    """A stream with a deadline for each message.

    A message must come within `seconds` of being asked for; otherwise Stalled is raised. Whoever reads may change that.
    """

    def __init__(self, messages: AsyncIterator[_T], seconds: float) -> None:
        self._messages, self.seconds = messages, seconds

    async def __anext__(self) -> _T:
        try:
            async with asyncio.timeout(self.seconds):
                return await anext(self._messages)
        except TimeoutError as error:
            raise Stalled(f"no message came for {self.seconds:g} s") from error


async def write(context: Any, message: Any, seconds: float) -> None:
    """Write a message of a response stream, and wait for gRPC.

    Args:
        context: The context of the call.
        message: The message.
        seconds: How long it may take.

    Raises:
        Stalled: If the caller has read nothing for that long.
        Gone: If the caller has closed the connection.
    """
    try:
        async with asyncio.timeout(seconds):
            await _finish(context.write(message))
    except TimeoutError:
        raise Stalled(f"the caller read nothing for {seconds:g} s") from None
    except Exception as error:  # gRPC has no public name for a write to a stream that has ended.
        raise Gone("the caller has closed the connection") from error


async def answer(context: Any, message: Any, seconds: float) -> None:
    """Write a message as `write` does, where only the caller can cancel.

    Then no status can follow a write that has not ended, and no task of its own is needed that finishes it.

    Raises:
        Stalled: If the caller has read nothing for `seconds`.
        Gone: If the caller has closed the connection.
    """
    try:
        async with asyncio.timeout(seconds):
            await write_whole(context, message)
    except TimeoutError:
        raise Stalled(f"the caller read nothing for {seconds:g} s") from None


async def write_whole(context: Any, message: Any) -> None:
    """Write a message, where nobody cancels a write that has begun.

    Raises:
        Gone: If the caller has closed the connection.
    """
    try:
        await context.write(message)
    except Exception as error:  # gRPC has no public name for a write to a stream that has ended.
        raise Gone("the caller has closed the connection") from error


async def after_write(writing: asyncio.Lock) -> None:
    """Wait for the end of a write to a stream.

    The lock under which it is written to is held afterwards. gRPC loses a status that is sent before a write
    has ended. One that takes longer than half a second is given up.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(WRITE_GRACE):
            await writing.acquire()


async def _finish(sending: Awaitable[None]) -> None:
    """Wait for a write that has begun, even if cancelled.

    It gets half a second to end then.
    """
    task = asyncio.ensure_future(sending)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        # gRPC does not stop a write that it has begun, and loses a status that is sent before the write has ended.
        with suppress(Exception):
            await asyncio.wait_for(task, WRITE_GRACE)
        raise
