"""The interceptor that limits calls by address before any other work.

Each call of a port enters through it.

It goes after the Boundary, and before the interceptor that checks who calls.
"""

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from grpc import aio

from fedring.rpc.errors import BadRequest, Stalled
from fedring.rpc.handlers import FACTORY
from fedring.server.guard.callers import Callers
from fedring.server.guard.sockets import Address, Port

log = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0  # between two looks, at least
_PAUSE = 25  # times the duration of a look, at least


class Entrance(aio.ServerInterceptor):
    """Admits the calls of one port, and ends connections beyond its limits.

    gRPC reads the message of a unary call before it calls a handler. So a caller could begin calls without a message
    and cancel them, and no handler would ever learn who it was. Here, all calls are taken as streams of messages: the
    handler runs as soon as the call begins.

    Args:
        callers: What the callers have asked so far, and their limits.
        message_seconds: How long the only message of a call may take.
    """

    def __init__(self, callers: Callers, message_seconds: float) -> None:
        self._callers = callers
        self._message_seconds = message_seconds
        self._port: Port | None = None
        self._sees = True  # until no descriptor is left to look with
        self._blocked: list[Address] = []  # which the listeners drop
        self._filters = True  # until the system turns out to have none

    def listen_at(self, address: str) -> str:
        """Watch connections to this "host:port", and return it.

        Unix sockets have no such connections.
        """
        if not address.startswith("unix:"):
            self._port = Port(int(address.rpartition(":")[2]))
        return address

    async def look_after_connections(self) -> None:
        """End connections and block addresses beyond the limits.

        Callers that never make a call are covered, too.
        """
        clock = asyncio.get_running_loop().time
        while self._port:
            began = clock()
            self._look(self._port)
            # A look at thousands of connections takes long: it must not take a part of the processor that matters.
            await asyncio.sleep(max(_LOOK_SECONDS, _PAUSE * (clock() - began)))

    async def intercept_service(self, continuation: Callable[..., Awaitable[Any]], handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        # An unknown method stays unknown: gRPC answers it, without a handler.
        if handler is None:
            return None
        kind, _ = FACTORY[handler.request_streaming, handler.response_streaming]
        inner, streams = getattr(handler, kind), handler.request_streaming
        _, factory = FACTORY[True, handler.response_streaming]

        async def call(requests: AsyncIterator[Any], context: Any) -> Any:
            with self._admitted(context.peer()):
                return await inner(requests if streams else await self._only(requests), context)

        async def generate(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
            with self._admitted(context.peer()):
                async for response in inner(requests if streams else await self._only(requests), context):
                    yield response

        return factory(
            generate if inspect.isasyncgenfunction(inner) else call,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    @contextmanager
    def _admitted(self, peer: str) -> Iterator[None]:
        """Run the body of a call, and note how it ended."""
        now = asyncio.get_running_loop().time
        call, reset = self._callers.begin(peer, now()), False
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            reset = True
            raise
        finally:
            if self._callers.end(call, now(), reset=reset) and self._port:
                self._look(self._port)

    async def _only(self, messages: AsyncIterator[Any]) -> Any:
        """Return the message of a call that has one."""
        try:
            async with asyncio.timeout(self._message_seconds):
                return await anext(messages)
        except StopAsyncIteration:
            raise BadRequest("the call has no message") from None
        except TimeoutError:
            raise Stalled(f"no message came for {self._message_seconds:g} s") from None

    def _look(self, port: Port) -> None:
        """End connections beyond the limits, and block their addresses.

        The listener drops packets of the blocked addresses.
        """
        now = asyncio.get_running_loop().time()
        try:
            doomed = self._callers.look(port.connections(), now)
        except OSError as error:
            if self._sees:
                log.warning("cannot look at the connections to port %d: %s", port.number, error)
            self._sees = False
            return
        # Blocking comes before ending, so that an ended caller cannot come back in between.
        self._sees = True
        before, self._blocked = self._blocked, self._callers.blocked(now)
        if self._blocked != before and self._filters:
            try:
                port.block(self._blocked)
            except OSError as error:
                self._filters = False
                log.warning("this system cannot block addresses, so their connections end soon after: %s", error)
        for connection in doomed:
            connection.end()
        if fresh := set(self._blocked) - set(before):
            names = ", ".join(sorted(map(str, fresh))[:10])
            text = "ended %d connections to port %d; for a while no new ones from %s (see exempt_addresses)"
            log.warning(text, len(doomed), port.number, names)
