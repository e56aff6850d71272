"""Calls of clients that trace, as spans of this process."""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from grpc import aio

from fedring.daemon.tracing import KEY, Span, go_on_in


class Spans(aio.ServerInterceptor):
    """A call that names the span it belongs to is a span of its own; others are none. Comes after who may call."""

    async def intercept_service(self, continuation: Callable[..., Awaitable[Any]], handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        metadata = handler_call_details.invocation_metadata or ()
        parent = next((str(value) for key, value in metadata if key == KEY), "")
        if handler is None or not parent:
            return handler
        name = handler_call_details.method.rpartition("/")[2]
        kind = f"{_side(handler.request_streaming)}_{_side(handler.response_streaming)}"
        inner = getattr(handler, kind)

        async def call(request: Any, context: Any) -> Any:
            with _begun(name, parent):
                return await inner(request, context)

        async def generate(request: Any, context: Any) -> AsyncIterator[Any]:
            with _begun(name, parent):
                async for response in inner(request, context):
                    yield response

        return handler._replace(**{kind: generate if inspect.isasyncgenfunction(inner) else call})


@contextmanager
def _begun(name: str, parent: str) -> Iterator[None]:
    begun = Span(name, parent)
    go_on_in(begun)  # for good: the task is the call's own
    try:
        yield
    finally:
        begun.end()


def _side(streaming: bool) -> str:
    return "stream" if streaming else "unary"
