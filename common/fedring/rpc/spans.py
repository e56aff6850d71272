"""Calls of clients that trace, as spans of this process."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from grpc import aio

from fedring.daemon.tracing import KEY, go_on_in, start_span
from fedring.rpc.handlers import FACTORY, around


class Spans(aio.ServerInterceptor):
    """A call that names the span it belongs to is a span of its own; others are none. Comes after who may call."""

    async def intercept_service(self, continuation: Callable[..., Awaitable[Any]], handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        metadata = handler_call_details.invocation_metadata or ()
        parent = next((str(value) for key, value in metadata if key == KEY), "")
        if handler is None or not parent:
            return handler
        name = handler_call_details.method.rpartition("/")[2]
        kind, _ = FACTORY[handler.request_streaming, handler.response_streaming]
        method = around(getattr(handler, kind), lambda _, context: _begun(name, parent, context))
        return handler._replace(**{kind: method})


@asynccontextmanager
async def _begun(name: str, parent: str, context: Any) -> AsyncIterator[Any]:
    begun = start_span(name, parent)
    go_on_in(begun)  # for good: the task is the call's own
    try:
        yield context
    finally:
        begun.end()
