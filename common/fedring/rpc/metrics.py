"""Calls of gRPC, counted by method and by the code that the caller sees."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import FileDescriptor
from grpc import StatusCode, aio
from prometheus_client import Counter, Gauge, Histogram

from fedring.daemon.metrics import Registry
from fedring.rpc.channel import is_loopback
from fedring.rpc.chunks import serialize
from fedring.rpc.handlers import FACTORY, around
from fedring.rpc.streams import GRPC_PREFIX

_BUCKETS = (0.001, 0.005, 0.025, 0.1, 0.5, 2.5, 10.0, 60.0, 600.0)
_NEWS = 0.1  # seconds that a call may still have when its caller's deadline has passed
_NAMES = {code.value[0]: code.name for code in StatusCode}


UNKNOWN = "unknown"
"""What all methods that a server does not have are counted as."""


def check_metrics_address(address: str, *, insecure: bool) -> None:
    """Return if metrics may be served there; ValueError if not."""
    if address and not is_loopback(address) and not insecure:
        raise ValueError(
            f"{address!r} can be reached from other hosts in plaintext: set metrics_insecure = true to let them read "
            "metrics"
        )


@dataclass(frozen=True, slots=True)
class Method:
    """The metrics of one method."""

    started: Counter
    handled: dict[str, Counter]  # by code
    seconds: Histogram
    in_flight: Gauge
    sent: Counter
    received: Counter

    def begin(self) -> float:
        """A call has begun; give what this returns to `end`."""
        self.started.inc()
        self.in_flight.inc()
        return time.perf_counter()

    def end(self, began: float, code: str) -> None:
        """The call has ended."""
        self.handled[code].inc()
        self.seconds.observe(time.perf_counter() - began)
        self.in_flight.dec()  # last: whoever reads that no call is in flight finds all of them counted

    def sending(self, write: Callable[[Any], bytes] | None) -> Callable[[Any], bytes]:
        """`write`, with its bytes counted as they are on the wire."""
        written = write or serialize

        def count(message: Any) -> bytes:
            data = written(message)
            self.sent.inc(len(data) + GRPC_PREFIX)
            return data

        return count

    def receiving(self, parse: Callable[[bytes], Any] | None) -> Callable[[bytes], Any]:
        """`parse`, with its bytes counted as they are on the wire."""

        def count(data: bytes) -> Any:
            self.received.inc(len(data) + GRPC_PREFIX)
            return parse(data) if parse else data

        return count


class Calls:
    """All calls of one side, "server" or "client"; the methods of `files` are known before they are called."""

    def __init__(self, side: str, registry: Registry, files: Iterable[FileDescriptor]) -> None:
        name, no = f"grpc_{side}", ()
        self._started = registry.counter(f"{name}_started_total", "Calls that began.", grpc_method=no)
        text = "Calls that ended, by the code that the caller saw."
        self._handled = registry.counter(f"{name}_handled_total", text, grpc_method=no, grpc_code=no)
        text = "From a call's first message to its status."
        self._seconds = registry.histogram(f"{name}_handling_seconds", text, _BUCKETS, grpc_method=no)
        self._in_flight = registry.gauge(f"{name}_in_flight_calls", "Calls that have not ended.", grpc_method=no)
        text = "Bytes of messages that were sent, as they are on the wire."
        self._sent = registry.counter(f"{name}_sent_bytes_total", text, grpc_method=no)
        text = "Bytes of messages that came, as they are on the wire."
        self._received = registry.counter(f"{name}_received_bytes_total", text, grpc_method=no)
        self._methods: dict[str, Method] = {}
        for file in files:
            for service in file.services_by_name.values():
                for method in service.methods:
                    self.of(f"/{service.full_name}/{method.name}")

    def of(self, path: str) -> Method:
        """The metrics of the method at that path, "/package.Service/Method"."""
        if path not in self._methods:
            label = path.rpartition(".")[2].lstrip("/")
            self._methods[path] = Method(
                self._started.labels(label),
                {code.name: self._handled.labels(label, code.name) for code in StatusCode},
                self._seconds.labels(label),
                self._in_flight.labels(label),
                self._sent.labels(label),
                self._received.labels(label),
            )
        return self._methods[path]

    def known(self, path: str) -> Method | None:
        """Return the metrics of the method at that path; None if nobody has asked for them by `of`."""
        return self._methods.get(path)


class CountCalls(aio.ServerInterceptor):
    """Counts a server's calls. It goes before the Boundary: only there a call has the code that its caller sees."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._unknown = calls.of(UNKNOWN)

    async def intercept_service(self, continuation: Callable[..., Awaitable[Any]], handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        # The name of a method that does not exist is the caller's, and no label.
        method = self._calls.known(handler_call_details.method) or self._unknown
        kind, factory = FACTORY[handler.request_streaming, handler.response_streaming]
        return factory(
            around(getattr(handler, kind), lambda _, context: _counted(method, context)),
            request_deserializer=method.receiving(handler.request_deserializer),
            response_serializer=method.sending(handler.response_serializer),
        )


class _Watched:
    """A call's context that knows what the call was aborted with: not every version of grpc's own tells."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._aborted: StatusCode | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def abort(self, code: StatusCode, *args: Any, **kwargs: Any) -> None:
        """End the call."""
        self._aborted = code
        await self._context.abort(code, *args, **kwargs)

    def ended_as(self) -> str:
        """The code of a call that has returned, or was aborted."""
        code = self._aborted or self._context.code() or StatusCode.OK
        return code.name if isinstance(code, StatusCode) else _NAMES[code]


@asynccontextmanager
async def _counted(method: Method, context: Any) -> AsyncIterator[_Watched]:
    """Inside, the call is served; afterwards it has counted."""
    watched, began = _Watched(context), method.begin()
    code = StatusCode.UNKNOWN.name  # what grpc makes of an exception
    try:
        yield watched
        code = watched.ended_as()
    except (asyncio.CancelledError, GeneratorExit):
        left = context.time_remaining()
        code = (StatusCode.CANCELLED if left is None or left > _NEWS else StatusCode.DEADLINE_EXCEEDED).name
        raise
    except aio.AbortError:
        code = watched.ended_as()
        raise
    finally:
        method.end(began, code)


def counted(channel: aio.Channel, calls: Calls) -> aio.Channel:
    """`channel`, with its calls counted.

    Not by interceptors: those of grpc.aio put a queue between a stream and who writes to it.
    """
    wrapped: Any = _CountedChannel(channel, calls)  # as far as stubs need it
    return wrapped  # type: ignore[no-any-return]  # as above


class _CountedChannel:
    """What stubs ask of a channel."""

    def __init__(self, channel: aio.Channel, calls: Calls) -> None:
        self._channel, self._calls = channel, calls

    def unary_unary(self, path: str, *args: Any, **options: Any) -> Any:
        """As grpc's; so are the others."""
        return self._counting(self._channel.unary_unary, path, *args, **options)

    def unary_stream(self, path: str, *args: Any, **options: Any) -> Any:
        """As grpc's."""
        return self._counting(self._channel.unary_stream, path, *args, **options)

    def stream_unary(self, path: str, *args: Any, **options: Any) -> Any:
        """As grpc's."""
        return self._counting(self._channel.stream_unary, path, *args, **options)

    def stream_stream(self, path: str, *args: Any, **options: Any) -> Any:
        """As grpc's."""
        return self._counting(self._channel.stream_stream, path, *args, **options)

    async def close(self) -> None:
        """End every call."""
        await self._channel.close()

    def _counting(
        self,
        make: Callable[..., Callable[..., Any]],
        path: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        **options: Any,
    ) -> Callable[..., Any]:
        method = self._calls.of(path)
        start = make(path, method.sending(request_serializer), method.receiving(response_deserializer), **options)

        def call(*args: Any, **kwargs: Any) -> Any:
            begun = start(*args, **kwargs)
            began = method.begin()
            begun.add_done_callback(lambda done: method.end(began, _code_of(done)))
            return begun

        return call


def _code_of(call: Any) -> str:
    """The code of a call that is done: grpc's coroutine has nothing to wait for."""
    asking = call.code()
    try:
        asking.send(None)
    except StopIteration as told:
        return str(told.value.name)
    asking.close()
    return StatusCode.UNKNOWN.name
