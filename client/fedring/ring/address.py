"""Where a worker listens, and how its peers get there.

An address is "host:port", or "host:port;host's id;path", where the path of a Unix socket may be empty. Peers with one
id share a kernel: they can take the path, and share memory.
"""

import os
import socket
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from fedring.ring.errors import RingError
from fedring.ring.frames import MAX_MESSAGE
from fedring.ring.options import RingOptions

_MAX_STREAMS = 1024
_FRAMES = [("grpc.http2.ping_timeout_ms", 2**31 - 1)]  # data on a slow line keep pings waiting: the pulse's count
_SOCKET = "ring.sock"


@dataclass(frozen=True, slots=True, eq=False)
class Listener:
    """A server that can be started, and where it listens."""

    grpc: grpc.Server
    port: int
    unix_path: str  # empty = none

    def close(self) -> None:
        """The port is free again."""
        self.grpc.stop(0).wait(5)
        if self.unix_path:
            path = Path(self.unix_path)
            path.unlink(missing_ok=True)
            path.parent.rmdir()


class _ThreadPerStream(ThreadPoolExecutor):
    """A thread for each call, gone with it; a daemon, so that a worker which forgets to close can still exit."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001  # handed to the one who waits, as executors do
                future.set_exception(error)

        threading.Thread(target=run, name="ring-stream", daemon=True).start()
        return future


def open_server(options: RingOptions, handler: grpc.GenericRpcHandler) -> Listener:
    """A server on the options' port, not yet started; RingError if the port is taken."""
    server = grpc.server(
        _ThreadPerStream(),
        [handler],
        options=[*_channel_options(), *_FRAMES],
        maximum_concurrent_rpcs=_MAX_STREAMS,
    )
    credentials = _server_credentials(options)
    try:
        if credentials is None:
            port = server.add_insecure_port(options.listen)
        else:
            port = server.add_secure_port(options.listen, credentials)
    except RuntimeError as error:
        raise RingError(f"cannot listen on {options.listen}: {error}") from error
    path = ""
    if options.unix_sockets:
        path = str(Path(tempfile.mkdtemp(prefix="fedring-")) / _SOCKET)  # a folder that no other user can enter
        server.add_insecure_port(f"unix:{path}")
    return Listener(server, port, path)


def advertised(options: RingOptions, port: int, unix_path: str) -> str:
    """The address that peers dial."""
    host, _, given = (options.advertise or options.listen).rpartition(":")
    if options.advertise and not given.isdecimal():
        host, given = options.advertise, ""
    if host in ("0.0.0.0", "[::]", "*"):
        host = socket.getfqdn()
    tcp = f"{host}:{int(given or 0) or port}" if options.advertise else f"{host}:{port}"
    return f"{tcp};{_host_id()};{unix_path}" if unix_path or options.shared_memory else tcp


def is_here(address: str) -> bool:
    """Whether the peer sees the same processes and memory as this one."""
    return address.partition(";")[2].partition(";")[0] == _host_id()


def dial(address: str, options: RingOptions, *, pulse: bool = False, name: str = "") -> grpc.Channel:
    """A channel of its own to a peer's address, for frames, or for the pulse that tells whether the peer lives.

    With TLS, the peer's certificate must carry the `name`; without one, tls_name or the host that is dialled.
    """
    tcp, _, unix = address.partition(";")
    host_id, _, path = unix.partition(";")
    settings = [*_channel_options(), *(_pulse_options(options) if pulse else _FRAMES)]
    if path and options.unix_sockets and host_id == _host_id() and Path(path).is_socket():
        return grpc.insecure_channel(f"unix:{path}", settings)
    if options.tls_ca is None:
        return grpc.insecure_channel(tcp, settings)
    if wanted := name or options.tls_name:
        settings = [*settings, ("grpc.ssl_target_name_override", wanted)]
    ca, key, certificate = _pem(options)
    return grpc.secure_channel(tcp, grpc.ssl_channel_credentials(ca, key, certificate), settings)


def _pulse_options(options: RingOptions) -> list[tuple[str, Any]]:
    every = max(250, round(options.lost_after_seconds * 250))
    patience = round(options.lost_after_seconds * 1000) - every
    return [
        ("grpc.keepalive_time_ms", every),
        ("grpc.keepalive_timeout_ms", patience),
        ("grpc.http2.ping_timeout_ms", patience),  # without it the first unanswered ping counts after a minute
        ("grpc.keepalive_permit_without_calls", 1),
    ]


def _channel_options() -> list[tuple[str, Any]]:
    return [
        ("grpc.max_receive_message_length", MAX_MESSAGE),
        ("grpc.max_send_message_length", MAX_MESSAGE),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 100),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 5000),  # how long an attempt may take, too
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),  # what leads to the world does not lead to a peer
        ("grpc.enable_retries", 0),  # a frame is sent once
        ("grpc.so_reuseport", 0),
    ]


def _server_credentials(options: RingOptions) -> grpc.ServerCredentials | None:
    if options.tls_ca is None:
        return None
    ca, key, certificate = _pem(options)
    return grpc.ssl_server_credentials([(key, certificate)], ca, require_client_auth=True)


def _pem(options: RingOptions) -> tuple[bytes, bytes, bytes]:
    """The certificate authority, the private key, and the certificate."""
    files = [path for path in (options.tls_ca, options.tls_key, options.tls_cert) if path is not None]
    try:
        ca, key, certificate = (path.read_bytes() for path in files)
    except OSError as error:
        raise RingError(f"cannot read {error.filename}: {error.strerror}") from error
    return ca, key, certificate


def _host_id() -> str:
    """Equal for all processes of one user that see each other; of no use elsewhere."""
    boot, processes = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    if not (boot.exists() and processes.exists()):
        return f"{socket.gethostname()}-{os.getpid()}"
    return f"{boot.read_text().strip()}-{processes.stat().st_ino}-{os.getuid()}"
