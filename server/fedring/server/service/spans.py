"""Spans for calls whose clients record a trace."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from grpc import aio

from fedring.daemon.tracing import KEY, go_on_in, start_span
from fedring.rpc.handlers import FACTORY, around


class TraceCalls(aio.ServerInterceptor):
    """Opens a span for each call that names its parent span.

    It leaves other calls alone.

    It goes after `Auth`, so that a call that is refused leaves no span.
    """

    async def intercept_service(self, continuation: Callable[..., Awaitable[Any]], handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        metadata = handler_call_details.invocation_metadata or ()
        parent = next((str(value) for key, value in metadata if key == KEY), "")
        if handler is None or not parent:
            return handler
        name = handler_call_details.method.rpartition("/")[2]
        kind, _ = FACTORY[handler.request_streaming, handler.response_streaming]
        method = around(getattr(handler, kind), lambda _, context: _in_span(name, parent, context))
        return handler._replace(**{kind: method})


@asynccontextmanager
async def _in_span(name: str, parent: str, context: Any) -> AsyncIterator[Any]:
    span = start_span(name, parent)
    go_on_in(span)  # It is never undone, because the task serves this call alone.
    try:
        yield context
    finally:
        span.end()
