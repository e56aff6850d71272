"""Calls of clients that trace, as spans of this process."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from grpc import aio

from fedring.daemon.tracing import KEY, Span, go_on_in


class Spans(aio.ServerInterceptor):
    """A call that names the span it belongs to is a span of its own, until it ends; others are none."""

    async def intercept_service(self, continuation: Callable[..., Awaitable[Any]], handler_call_details: Any) -> Any:
        metadata = handler_call_details.invocation_metadata or ()
        parent = next((str(value) for key, value in metadata if key == KEY), "")
        task = asyncio.current_task()  # grpc runs the handler in it
        if parent and task is not None:
            begun = Span(handler_call_details.method.rpartition("/")[2], parent)
            go_on_in(begun)
            task.add_done_callback(lambda _: begun.end())
        return await continuation(handler_call_details)
