"""A proxy between one client and a server that passes every call on, and hands each message to a test."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import grpc

_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 200),
    ("grpc.use_local_subchannel_pool", 1),
]
_THREADS = 16  # each call holds one; a client has a stream of events, one of updates, and few others at a time

Take = Callable[[bytes], object]
Watch = Callable[[str], Take]
"""Is called with the name of each call's method, in any thread; returns what takes the messages of that call."""


def _leave(method: str) -> Take:
    return lambda message: None


class CallProxy(grpc.GenericRpcHandler):
    """Forwards all calls from `address` to a server until its `with` block ends.

    Args:
        target: the server's "host:port".
        upward: takes the messages of the client, before they are passed on.
        downward: takes those of the server.
        change: returns what is passed on in the place of a message of the server.
        address: where to listen; "" = a port of this host.
    """

    def __init__(
        self,
        target: str,
        upward: Watch = _leave,
        downward: Watch = _leave,
        *,
        change: Callable[[str, bytes], bytes] = lambda method, message: message,
        address: str = "",
    ) -> None:
        self._channel = grpc.insecure_channel(target, _OPTIONS)
        self._upward, self._downward = upward, downward
        self._server = grpc.server(ThreadPoolExecutor(_THREADS), [self], options=_OPTIONS)
        self._change = change
        port = self._server.add_insecure_port(address or "127.0.0.1:0")
        self.address = address or f"127.0.0.1:{port}"
        self._server.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._server.stop(0).wait()
        self._channel.close()

    def service(self, handler_call_details: Any) -> Any:
        """Return what handles a call: a stream of bytes both ways looks on the wire as every other call does."""
        path: str = handler_call_details.method
        method = path.rpartition("/")[2]

        def forward(messages: Iterator[bytes], context: Any) -> Iterator[bytes]:
            begin: Any = self._channel.stream_stream(path)
            call = begin(_taken(messages, self._upward(method)), metadata=_passed_on(context))
            context.add_callback(call.cancel)
            take = self._downward(method)
            try:
                for message in call:
                    take(message)
                    yield self._change(method, message)
            except grpc.RpcError as error:
                context.set_trailing_metadata(_visible(error.trailing_metadata()))
                context.abort(error.code(), error.details())
            context.set_trailing_metadata(_visible(call.trailing_metadata()))

        return grpc.stream_stream_rpc_method_handler(forward)


def _taken(messages: Iterator[bytes], take: Take) -> Iterator[bytes]:
    with suppress(grpc.RpcError):  # the client has gone
        for message in messages:
            take(message)
            yield message


def _passed_on(context: Any) -> tuple[tuple[str, str | bytes], ...]:
    return _visible(context.invocation_metadata())


def _visible(metadata: Any) -> tuple[tuple[str, str | bytes], ...]:
    """Return the entries that programs set themselves, not those of the connection."""
    own = ("user-agent", "grpc-", "content-type", "te")
    return tuple((key, value) for key, value in metadata or () if not key.startswith(own))
