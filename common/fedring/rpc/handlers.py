"""Taking a method's handler apart and putting it together again.

Interceptors need both.
"""

import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
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
        A function of the same kind as `method`.
    """

    async def call(request: Any, context: Any) -> Any:
        async with enter(request, context) as entered:
            return await method(request, entered)

    async def generate(request: Any, context: Any) -> AsyncIterator[Any]:
        async with enter(request, context) as entered:
            async for response in method(request, entered):
                yield response

    # gRPC also tells the two kinds apart by the function, so the wrapper must be of the same kind.
    return generate if inspect.isasyncgenfunction(method) else call
