"""Taking a method's handler apart and putting it together again.

Interceptors need both.
"""

import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any

import grpc

from fedring.rpc.errors import UnknownMethod

FACTORY = {
    (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
    (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
    (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}
"""The name of the handler's attribute that holds the method, and the function that makes such a handler.

The keys are whether the request is a stream, and whether the response is one.
"""


def unknown_method(method: str) -> Any:
    """Return a handler for a method that the port does not serve.

    Without it, gRPC refuses the call before any interceptor sees it: without a reason, a check of the caller, or a
    metric.

    Args:
        method: The path that the caller sent; "/package.Service/Method" unless the caller is broken.

    Returns:
        A handler that refuses every call with UnknownMethod before it reads a message.
    """

    async def refuse(requests: AsyncIterator[Any], context: Any) -> None:
        text = f"the method {method[:100]!a} is not served at this port: check the address and the versions"
        raise UnknownMethod(text)

    return grpc.stream_stream_rpc_method_handler(refuse)


def around(method: Callable[..., Any], enter: Callable[[Any, Any], AbstractAsyncContextManager[Any]]) -> Any:
    """Wrap a handler's method in a context manager for each call.

    Args:
        method: A coroutine function or an asynchronous generator function of (request, context).
        enter: Makes the context manager from the same two arguments; the object that it yields is passed on as the
            context.

    Returns:
        A coroutine function, which gRPC takes in the place of either kind.
    """

    async def call(request: Any, context: Any) -> Any:
        async with enter(request, context) as entered:
            return await method(request, entered)

    async def write(request: Any, context: Any) -> None:
        # Written here, not yielded: else a cancellation while a slow reader is waited for is raised in gRPC's code,
        # which ends the call without a status, and the context manager learns of it later, if at all.
        async with enter(request, context) as entered, aclosing(method(request, entered)) as responses:
            async for response in responses:
                await entered.write(response)

    return write if inspect.isasyncgenfunction(method) else call
