"""Streams that are never late, and what they weigh."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.message import Message

from fedring.rpc.errors import Stalled

_T = TypeVar("_T")
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
