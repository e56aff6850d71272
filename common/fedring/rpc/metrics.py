"""Metrics of gRPC calls, by method and status code.

The status code is the one that the caller sees.
"""

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
from fedring.rpc.channel import at_once, is_loopback, with_calls
from fedring.rpc.chunks import serialize
from fedring.rpc.handlers import FACTORY, around
from fedring.rpc.streams import GRPC_PREFIX

_BUCKETS = (0.001, 0.005, 0.025, 0.1, 0.5, 2.5, 10.0, 60.0, 600.0)
_DEADLINE_SLACK = 0.1  # seconds: a call that is cancelled with less time left than this has passed its deadline
_NAMES = {code.value[0]: code.name for code in StatusCode}


UNKNOWN = "unknown"
"""The label under which calls of methods that the server does not have are counted."""


def check_metrics_address(address: str, *, insecure: bool) -> None:
    """Check that metrics may be served at an address.

    Args:
        address: "host:port"; empty = nowhere.
        insecure: Whether other hosts may read metrics in plaintext.

    Raises:
        ValueError: If other hosts could read them although they may not.
    """
    if address and not is_loopback(address) and not insecure:
        raise ValueError(
            f"{address!r} can be reached from other hosts in plaintext: set metrics_insecure = true to let them read "
            "metrics"
        )


@dataclass(frozen=True, slots=True)
class MethodMetrics:
    """The metrics of one method."""

    started: Counter
    handled: dict[str, Counter]  # by code
    seconds: Histogram
    in_flight: Gauge
    sent: Counter
    received: Counter

    def begin(self) -> float:
        """Count the beginning of a call.

        Returns:
            The time for `end`, in seconds.
        """
        self.started.inc()
        self.in_flight.inc()
        return time.perf_counter()

    def end(self, began: float, code: str) -> None:
        """Count the end of a call.

        Args:
            began: The time that `begin` returned.
            code: The name of the status code.
        """
        self.handled[code].inc()
        self.seconds.observe(time.perf_counter() - began)
        self.in_flight.dec()  # last, so that once it reads 0, all calls have been counted above

    def sending(self, write: Callable[[Any], bytes] | None) -> Callable[[Any], bytes]:
        """Wrap a serializer so that it counts the bytes on the wire."""
        written = write or serialize

        def count(message: Any) -> bytes:
            data = written(message)
            self.sent.inc(len(data) + GRPC_PREFIX)
            return data

        return count

    def receiving(self, parse: Callable[[bytes], Any] | None) -> Callable[[bytes], Any]:
        """Wrap a deserializer so that it counts the bytes on the wire."""

        def count(data: bytes) -> Any:
            self.received.inc(len(data) + GRPC_PREFIX)
            return parse(data) if parse else data

        return count


class CallMetrics:
    """The metrics of all calls that one side serves or makes.

    Args:
        side: "server" or "client", for the names of the metrics.
        registry: Where the metrics are registered.
        files: The services whose methods are shown, with zeros, before they are called for the first time.
    """

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
        text = "Bytes of messages that were received, as they are on the wire."
        self._received = registry.counter(f"{name}_received_bytes_total", text, grpc_method=no)
        self._methods: dict[str, MethodMetrics] = {}
        for file in files:
            for service in file.services_by_name.values():
                for method in service.methods:
                    self.of(f"/{service.full_name}/{method.name}")

    def of(self, path: str) -> MethodMetrics:
        """Return the metrics of a method; make them if need be.

        Args:
            path: The method's path, "/package.Service/Method".
        """
        if path not in self._methods:
            label = path.rpartition(".")[2].lstrip("/")
            self._methods[path] = MethodMetrics(
                self._started.labels(label),
                {code.name: self._handled.labels(label, code.name) for code in StatusCode},
                self._seconds.labels(label),
                self._in_flight.labels(label),
                self._sent.labels(label),
                self._received.labels(label),
            )
        return self._methods[path]

    def known(self, path: str) -> MethodMetrics | None:
        """Return the metrics of a method by its path, or None.

        It is None if `of` has not made them.
        """
        return self._methods.get(path)


class CountCalls(aio.ServerInterceptor):
    """Counts a server's calls.

    It goes before the Boundary, where a call has the status code that its caller sees.
    """

    def __init__(self, calls: CallMetrics) -> None:
        self._calls = calls
        self._unknown = calls.of(UNKNOWN)

    async def intercept_service(self, continuation: Callable[..., Awaitable[Any]], handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        # Callers choose the names of methods that do not exist, so these must not become labels.
        method = self._calls.known(handler_call_details.method) or self._unknown
        kind, factory = FACTORY[handler.request_streaming, handler.response_streaming]
        return factory(
            around(getattr(handler, kind), lambda _, context: _counted(method, context)),
            request_deserializer=method.receiving(handler.request_deserializer),
            response_serializer=method.sending(handler.response_serializer),
        )


class _StatusKeeper:
    """A call's context that remembers the status of an abort.

    Not every version of gRPC reveals it.
    """

    def __init__(self, context: Any) -> None:
        self._context = context
        self._aborted: StatusCode | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def abort(self, code: StatusCode, *args: Any, **kwargs: Any) -> None:
        """End the call with a status."""
        self._aborted = code
        await self._context.abort(code, *args, **kwargs)

    def ended_as(self) -> str:
        """Return the name of the status of an ended call.

        The call has returned or was aborted.
        """
        code = self._aborted or self._context.code() or StatusCode.OK
        return code.name if isinstance(code, StatusCode) else _NAMES[code]


@asynccontextmanager
async def _counted(method: MethodMetrics, context: Any) -> AsyncIterator[_StatusKeeper]:
    """Count the call that is served in the body."""
    watched, began = _StatusKeeper(context), method.begin()
    code = StatusCode.UNKNOWN.name  # what gRPC makes of an exception
    try:
        yield watched
        code = watched.ended_as()
    except (asyncio.CancelledError, GeneratorExit):
        left = context.time_remaining()
        code = (StatusCode.CANCELLED if left is None or left > _DEADLINE_SLACK else StatusCode.DEADLINE_EXCEEDED).name
        raise
    except aio.AbortError:
        code = watched.ended_as()
        raise
    finally:
        method.end(began, code)


def counted(channel: aio.Channel, calls: CallMetrics) -> aio.Channel:
    """Return a channel whose calls are counted.

    Args:
        channel: The channel over which calls go.
        calls: Where they are counted.
    """

    def counting(
        make: Callable[..., Callable[..., Any]],
        path: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        **options: Any,
    ) -> Callable[..., Any]:
        method = calls.of(path)
        start = make(path, method.sending(request_serializer), method.receiving(response_deserializer), **options)

        def call(*args: Any, **kwargs: Any) -> Any:
            begun = start(*args, **kwargs)
            began = method.begin()
            begun.add_done_callback(lambda done: method.end(began, at_once(done.code()).name))
            return begun

        return call

    return with_calls(channel, counting)
