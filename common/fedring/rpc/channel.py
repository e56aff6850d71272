"""Channels and servers with the options that this system wants (docs/operations)."""

import json
from collections.abc import Sequence
from typing import Any

import grpc
from grpc import aio

from fedring.rpc.tls import PLAINTEXT, Tls, channel_credentials

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
]
# Only idempotent unary calls are retried by gRPC; uploads go on by offset instead.
_SERVICE_CONFIG = json.dumps({"methodConfig": [{"name": _UNARY, "retryPolicy": _RETRY}]})

CLIENT_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # how long an attempt may take: a line may be slow, a server busy
    ("grpc.max_reconnect_backoff_ms", 5_000),
    ("grpc.service_config", _SERVICE_CONFIG),
]
SERVER_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.keepalive_time_ms", 120_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Clients ping each 60 s; the default of 300 s would close them with "too_many_pings".
    ("grpc.http2.min_ping_interval_without_data_ms", 30_000),
    # Two daemons on one port must fail loudly.
    ("grpc.so_reuseport", 0),
    # What a caller may send before it is read. gRPC's own estimate has no bound but the memory, of which each upload
    # takes some; with this one a line of 100 ms still carries 40 MB/s.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 4 << 20),
    # grpc.max_concurrent_streams is not set. 20,000 calls at once leave the server some 20 to 75 MB larger, and no
    # larger when they come again. A limit of 256 changes that for one connection, not for 20; and where one connection
    # carries the calls of many clients, as some proxies have it, those beyond the limit wait without being told why.
]


# A connection that was opened with an old certificate, or by somebody who is not welcome any more, ends at some time.
_AGING: list[tuple[str, Any]] = [
    ("grpc.max_connection_age_ms", 24 * 3600 * 1000),
    ("grpc.max_connection_age_grace_ms", 3600 * 1000),
]


def open_channel(address: str, tls: Tls = PLAINTEXT, *, own_connection: bool = False) -> aio.Channel:
    """Return a channel to an address, with the certificates as they are now.

    Args:
        address: "host:port" or "unix:path".
        tls: What encrypts it.
        own_connection: Whether it shares no connection with other channels of this process.
    """
    options = [*CLIENT_OPTIONS, ("grpc.use_local_subchannel_pool", int(own_connection))]
    if not encrypts(address, tls):
        return aio.insecure_channel(address, options=options)
    return aio.secure_channel(address, channel_credentials(tls), options=options)


def open_sync_channel(address: str, tls: Tls = PLAINTEXT, token: str = "") -> grpc.Channel:
    """As open_channel, for threads; every call on it shows the token, if it is encrypted."""
    if not encrypts(address, tls):
        return grpc.insecure_channel(address, options=CLIENT_OPTIONS)
    return grpc.secure_channel(address, channel_credentials(tls, token), options=CLIENT_OPTIONS)


def make_server(interceptors: Sequence[aio.ServerInterceptor], *, max_streams: int, tls: Tls = PLAINTEXT) -> aio.Server:
    """A server without services or ports that serves at most `max_streams` calls at once."""
    options = SERVER_OPTIONS + (_AGING if tls.on else [])
    return aio.server(interceptors=interceptors, options=options, maximum_concurrent_rpcs=max_streams)


def encrypts(address: str, tls: Tls) -> bool:
    """Whether what goes to `address` is encrypted: a Unix socket never is."""
    return tls.on and not address.startswith("unix:")


def is_loopback(address: str) -> bool:
    """Whether "host:port" or "unix:path" can be reached from this host alone."""
    host = address.rpartition(":")[0].strip("[]")
    return address.startswith("unix:") or host in ("localhost", "::1") or host.startswith("127.")
