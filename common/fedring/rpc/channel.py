"""gRPC channels and servers with the options that fedring needs."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar

import grpc
from grpc import aio

from fedring.rpc.tls import PLAINTEXT, Tls, channel_credentials

_T = TypeVar("_T")
_STATUS_SECONDS = 0.5  # how long the status of a call may take to come, once its stream has ended
_FAILED_WRITE = "Internal error from Core"  # the words of grpc.aio
_LOOPBACK = re.compile(r"127(\.[0-9]{1,8}){1,3}")
_RETRY = {
    "maxAttempts": 4,
    "initialBackoff": "0.2s",
    "maxBackoff": "5s",
    "backoffMultiplier": 2,
    "retryableStatusCodes": ["UNAVAILABLE"],
}
_UNARY = [
    {"service": "fedring.v1.TrainCmdService", "method": "ReportEvaluation"},
    {"service": "fedring.v1.ControlService", "method": "GetStatus"},
    {"service": "fedring.v1.ControlService", "method": "ListJobs"},
    {"service": "fedring.v1.ControlService", "method": "ListRounds"},
    {"service": "fedring.v1.ControlService", "method": "ListClients"},
    {"service": "fedring.v1.ControlService", "method": "ListModels"},
    {"service": "fedring.v1.ControlService", "method": "GetPrivacy"},
]
# gRPC itself retries only these calls, which are unary and idempotent. Uploads resume at an offset instead.
_SERVICE_CONFIG = json.dumps({"methodConfig": [{"name": _UNARY, "retryPolicy": _RETRY}]})

CLIENT_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # also the time limit of one attempt: lines may be slow and servers busy
    ("grpc.max_reconnect_backoff_ms", 5_000),
    ("grpc.service_config", _SERVICE_CONFIG),
]
SERVER_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.keepalive_time_ms", 120_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Clients ping every 60 s. With the default of 300 s the server would end them with "too_many_pings".
    ("grpc.http2.min_ping_interval_without_data_ms", 30_000),
    # A second daemon on the same port must fail to start.
    ("grpc.so_reuseport", 0),
    # How much a caller may send before the handler reads it. gRPC's own estimate may grow until the memory is full, for
    # each upload. With this limit a line with a delay of 100 ms still carries 40 MB/s.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 4 << 20),
    # Half a handshake or half a preface ends after this time; gRPC's default is 120 s.
    ("grpc.server_handshake_timeout_ms", 20_000),
    # So does a connection without calls. A channel that is used later connects again by itself.
    ("grpc.max_connection_idle_ms", 600_000),
    # Each call takes some 25 kB, and 20,000 of one connection left 44 MB. No client has more than some ten at once, and
    # proxies that are told a limit open another connection (HAProxy and Envoy do).
    ("grpc.max_concurrent_streams", 512),
]


# A connection ends after a day, because its certificate may have been replaced or revoked in the meantime.
_AGING: list[tuple[str, Any]] = [
    ("grpc.max_connection_age_ms", 24 * 3600 * 1000),
    ("grpc.max_connection_age_grace_ms", 3600 * 1000),
]


def open_channel(address: str, tls: Tls = PLAINTEXT, *, own_connection: bool = False) -> aio.Channel:
    """Open an asyncio channel with the certificates now on disk.

    Its calls end with the status that the server has sent, even if a write fails just then.

    Args:
        address: "host:port" or "unix:path".
        tls: The certificates. A channel to a Unix socket uses none.
        own_connection: Whether the channel must not share its connection with other channels of this process.

    Raises:
        ConfigError: If a certificate or key cannot be used.
    """
    options = [*CLIENT_OPTIONS, ("grpc.use_local_subchannel_pool", int(own_connection))]
    if encrypts(address, tls):
        channel = aio.secure_channel(address, channel_credentials(tls), options=options)
    else:
        channel = aio.insecure_channel(address, options=options)
    return with_calls(channel, _keeping_status)


def open_sync_channel(address: str, tls: Tls = PLAINTEXT, token: str = "") -> grpc.Channel:
    """Open a channel for threads with the certificates now on disk.

    Args:
        address: "host:port" or "unix:path".
        tls: The certificates. A channel to a Unix socket uses none.
        token: Sent with every call if it is not empty and the channel is encrypted.

    Raises:
        ConfigError: If a certificate or key cannot be used.
    """
    if not encrypts(address, tls):
        return grpc.insecure_channel(address, options=CLIENT_OPTIONS)
    return grpc.secure_channel(address, channel_credentials(tls, token), options=CLIENT_OPTIONS)


def make_server(
    interceptors: Sequence[aio.ServerInterceptor],
    *,
    max_streams: int,
    tls: Tls = PLAINTEXT,
    max_connections: int | None = None,
) -> aio.Server:
    """Return a server, still without services and ports.

    Args:
        interceptors: In the order in which they see a call.
        max_streams: How many calls it serves at once.
        tls: The certificates.
        max_connections: How many connections it takes; others are closed at once. None = any number.
    """
    options = SERVER_OPTIONS + (_AGING if tls.on else [])
    if max_connections is not None:
        options = [*options, ("grpc.max_allowed_incoming_connections", max_connections)]
    return aio.server(interceptors=interceptors, options=options, maximum_concurrent_rpcs=max_streams)


def encrypts(address: str, tls: Tls) -> bool:
    """Return whether calls to `address` are encrypted.

    Those to a Unix socket never are.
    """
    return tls.on and not address.startswith("unix:")


def is_loopback(address: str) -> bool:
    """Return whether "host:port" or "unix:path" can be reached from this host only."""
    host = address.rpartition(":")[0].strip("[]")
    # By its form, since the name of a host elsewhere may begin with 127, too.
    return address.startswith("unix:") or host in ("localhost", "::1") or bool(_LOOPBACK.fullmatch(host))


def with_calls(channel: aio.Channel, wrap: Callable[..., Callable[..., Any]]) -> aio.Channel:
    """Return a channel whose calls are wrapped.

    Interceptors are not used for this: those of grpc.aio put a queue between a stream and its writer.

    Args:
        channel: The channel over which calls go.
        wrap: Takes a method of it, such as `unary_unary`, and then that method's arguments. Returns the function that
            begins a call.
    """
    wrapped: Any = _Wrapped(channel, wrap)  # It has the part of a channel that stubs use.
    return wrapped  # type: ignore[no-any-return]  # see above


class _Wrapped:
    """The part of a channel that stubs use.

    The methods are those of aio.Channel.
    """

    def __init__(self, channel: aio.Channel, wrap: Callable[..., Callable[..., Any]]) -> None:
        self._channel, self._wrap = channel, wrap

    def unary_unary(self, *args: Any, **options: Any) -> Any:
        return self._wrap(self._channel.unary_unary, *args, **options)

    def unary_stream(self, *args: Any, **options: Any) -> Any:
        return self._wrap(self._channel.unary_stream, *args, **options)

    def stream_unary(self, *args: Any, **options: Any) -> Any:
        return self._wrap(self._channel.stream_unary, *args, **options)

    def stream_stream(self, *args: Any, **options: Any) -> Any:
        return self._wrap(self._channel.stream_stream, *args, **options)

    async def close(self) -> None:
        await self._channel.close()


def _keeping_status(make: Callable[..., Callable[..., Any]], *args: Any, **options: Any) -> Callable[..., Any]:
    start = make(*args, **options)
    if not isinstance(start, aio.StreamStreamMultiCallable):
        return start  # Its one message is written before anything is read.
    return lambda *given, **named: _WrittenCall(start(*given, **named))


class _WrittenCall:
    """A call that ends with the status that the server has sent.

    If a write fails as the call ends, grpc.aio puts INTERNAL in its place
    (https://github.com/grpc/grpc/issues/36066): a client would ask again, whatever the server has said. Before or after
    that, the status of the server comes, too, once all of its messages are read.
    """

    def __init__(self, call: Any) -> None:
        self._call = call
        self._messages = aiter(call)  # `call.read` reads no further once a write has failed
        self._error: aio.AioRpcError | None = None
        self._told = asyncio.Event()  # set once the server's status is here
        call.add_done_callback(self._end)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call `callback` once, when the call has ended."""
        self._call.add_done_callback(cache(callback))  # a second status calls it again

    async def read(self) -> Any:
        """Return the next message, or `aio.EOF` after the last one."""
        failure = None
        try:
            if (message := await anext(self._messages, aio.EOF)) is not aio.EOF:
                return message
        except aio.AioRpcError as error:
            failure = error
            with suppress(TimeoutError):
                async with asyncio.timeout(_STATUS_SECONDS):
                    await self._told.wait()
        if end := self._error or (None if self._told.is_set() else failure):
            raise end
        return aio.EOF

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not aio.EOF:
            yield message

    async def write(self, message: Any) -> None:
        """Send a message.

        Raises:
            InvalidStateError: If the call has ended. Who reads it learns why.
        """
        try:
            await self._call.write(message)
        except aio.AioRpcError as error:
            raise asyncio.InvalidStateError("the call has ended") from error

    def _end(self, call: Any) -> None:
        if self._told.is_set() or at_once(call.details()) == _FAILED_WRITE:
            return
        if (code := at_once(call.code())) is not grpc.StatusCode.OK:
            metadata = at_once(call.initial_metadata()), at_once(call.trailing_metadata())
            self._error = aio.AioRpcError(code, *metadata, at_once(call.details()), at_once(call.debug_error_string()))
        self._told.set()


def at_once(answer: Coroutine[Any, Any, _T]) -> _T:
    """Return the result of a coroutine that has nothing to wait for.

    Those that tell how a call of grpc.aio has ended are such coroutines, once it has.
    """
    try:
        answer.send(None)
    except StopIteration as told:
        return told.value  # type: ignore[no-any-return]  # typeshed does not know its type
    answer.close()
    raise RuntimeError("the coroutine waits")
