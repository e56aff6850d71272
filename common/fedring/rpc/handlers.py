"""The handler of a method, as interceptors take it apart and put it together again."""

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
"""By whether the request and the response are streams: the handler's field with the method, and what makes another."""


def unknown_method(method: str) -> Any:
    """Return a handler for a method that the port does not serve.

    gRPC would refuse the call, too, but past all interceptors: without a reason, unguarded and uncounted.

    Args:
        method: What the caller wrote, which is a path, "/package.Service/Method", if all is well.

    Returns:
        A handler that refuses every call, with UnknownMethod, before it reads a message.
    """

    async def refuse(requests: AsyncIterator[Any], context: Any) -> None:
        text = f"the method {method[:100]!a} is not served at this port: check the address and the versions"
        raise UnknownMethod(text)

    return grpc.stream_stream_rpc_method_handler(refuse)


def around(method: Callable[..., Any], enter: Callable[[Any, Any], AbstractAsyncContextManager[Any]]) -> Any:
    """`method`, each call of it inside `enter(request, context)`, with the context that this gives."""

    async def call(request: Any, context: Any) -> Any:
        async with enter(request, context) as entered:
            return await method(request, entered)

    async def generate(request: Any, context: Any) -> AsyncIterator[Any]:
        async with enter(request, context) as entered:
            async for response in method(request, entered):
                yield response

    return generate if inspect.isasyncgenfunction(method) else call
