"""Workers' addresses, gRPC channels to them, and the pulse.

A pulse is a call that tells whether a worker still lives.

An address is "host:port", or "host:port;host id;", where workers with the same host id share a kernel and a user: they
can use the local transport. The part after the second semicolon is not used.
"""

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from fedring.ring.errors import RingError
from fedring.ring.options import RingOptions
from fedring.ring.transport.frames import MAX_MESSAGE
from fedring.rpc.address import ANY_HOST, check_peer_address
from fedring.rpc.errors import status_of

EXCHANGE = "/fedring.v1.PeerService/Exchange"
PULSE = "/fedring.v1.PeerService/Pulse"
PEER_KEY, GENERATION_KEY = "fl-peer", "fl-generation"

_PROBE_SECONDS = 5.0  # for a worker on a busy machine; a host that is switched off takes this long

_CLOSE_SECONDS = 2.0

# On the connections of frames, data on a slow line keep pings waiting. The pings of the pulse count instead.
FRAME_OPTIONS = [("grpc.http2.ping_timeout_ms", 2**31 - 1)]


def advertised(options: RingOptions, port: int) -> str:
    """Return the address that peers dial."""
    host, _, given = (options.advertise or options.listen).rpartition(":")
    if options.advertise and not given.isdecimal():
        host, given = options.advertise, ""
    if host in ANY_HOST:
        host = socket.getfqdn()
    tcp = f"{host}:{int(given or 0) or port}" if options.advertise else f"{host}:{port}"
    return f"{tcp};{_host_id()};" if options.local_transport else tcp


def is_on_this_host(address: str) -> bool:
    """Return whether the peer shares this host's processes and memory."""
    return address.partition(";")[2].partition(";")[0] == _host_id()


def dial(address: str, options: RingOptions, *, pulse: bool = False, name: str = "") -> grpc.Channel:
    """Return a new channel to a peer.

    Args:
        address: The peer's address.
        options: This worker's options, for TLS and for how soon a silent peer is lost.
        pulse: Whether the channel is for the pulse, and not for frames.
        name: With TLS, the name in the peer's certificate. Without one it is tls_name, or else the host in the address.

    Raises:
        RingError: A file of the TLS options cannot be read, or the address is not host:port.
    """
    try:
        tcp = check_peer_address(address.partition(";")[0])  # The server, or another worker, has said it.
    except ValueError as error:
        raise RingError(f"a peer cannot be reached: {error}") from error
    settings = [*channel_options(), *(_pulse_options(options) if pulse else FRAME_OPTIONS)]
    if options.tls_ca is None:
        return grpc.insecure_channel(tcp, settings)
    if wanted := name or options.tls_name:
        settings = [*settings, ("grpc.ssl_target_name_override", wanted)]
    ca, key, certificate = _pem(options)
    return grpc.secure_channel(tcp, grpc.ssl_channel_credentials(ca, key, certificate), settings)


def close(channel: grpc.Channel) -> None:
    """Close a channel, and wait a moment until it is closed.

    gRPC closes a channel only once what it is writing has left. To a peer that is frozen, or cut off, nothing leaves;
    that channel is left to a thread.
    """
    closing = threading.Thread(target=channel.close, name="ring-close", daemon=True)
    closing.start()
    closing.join(_CLOSE_SECONDS)


def is_serving(address: str, options: RingOptions, *, generation: int) -> bool:
    """Ask a worker whether it takes part in a generation.

    A worker that is dead or frozen does not.

    The question is a stream without a sender, which the worker of that generation refuses with INVALID_ARGUMENT.
    """
    metadata = ((GENERATION_KEY, str(generation)),)
    try:
        with dial(address, options) as channel:
            question: Any = channel.unary_unary(EXCHANGE)
            question(b"", timeout=_PROBE_SECONDS, metadata=metadata)
    except grpc.RpcError as error:
        return status_of(error) is grpc.StatusCode.INVALID_ARGUMENT
    return False


def channel_options() -> list[tuple[str, Any]]:
    """Return the gRPC options of all connections between workers, for both ends."""
    return [
        ("grpc.max_receive_message_length", MAX_MESSAGE),
        ("grpc.max_send_message_length", MAX_MESSAGE),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 100),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 5000),  # also how long an attempt may take
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),  # a proxy to the internet does not lead to a peer
        ("grpc.enable_retries", 0),  # a frame is sent once
        ("grpc.so_reuseport", 0),
    ]


def server_credentials(options: RingOptions) -> grpc.ServerCredentials | None:
    """Return a server's mutual TLS credentials, or None without TLS."""
    if options.tls_ca is None:
        return None
    ca, key, certificate = _pem(options)
    return grpc.ssl_server_credentials([(key, certificate)], ca, require_client_auth=True)


class Pulse:
    """A call that detects the loss of a peer.

    The peer holds it open, on a connection of its own.

    gRPC's pings find such a peer: gRPC's threads answer them whatever Python does, and a frozen process cannot. On the
    connection of the frames they would come too late, behind the data of a slow line. `ended(detail)` is called once,
    when the peer is gone.
    """

    def __init__(self, channel: grpc.Channel, *, ended: Callable[[str], None]) -> None:
        self._channel = channel
        self._ended = ended
        call: Any = channel.unary_unary(PULSE)  # raw bytes both ways
        self._call = call.future(b"", wait_for_ready=True)
        self._call.add_done_callback(self._done)

    def close(self) -> None:
        """End the call and its connection."""
        self._call.cancel()
        close(self._channel)

    def _done(self, call: Any) -> None:
        self._ended(f"{call.code().name.lower()}: {call.details()}")


def hold_pulse(request: bytes, context: grpc.ServicerContext) -> bytes:
    """Serve a peer's pulse: return when the peer is gone."""
    gone = threading.Event()
    if context.add_callback(gone.set):
        gone.wait()
    return b""


def _pulse_options(options: RingOptions) -> list[tuple[str, Any]]:
    every = max(250, round(options.lost_after_seconds * 250))
    patience = round(options.lost_after_seconds * 1000) - every
    return [
        ("grpc.keepalive_time_ms", every),
        ("grpc.keepalive_timeout_ms", patience),
        ("grpc.http2.ping_timeout_ms", patience),  # without it the first unanswered ping counts after a minute
        ("grpc.keepalive_permit_without_calls", 1),
    ]


def _pem(options: RingOptions) -> tuple[bytes, bytes, bytes]:
    """Return the certificate authority, the private key, and the certificate."""
    files = [path for path in (options.tls_ca, options.tls_key, options.tls_cert) if path is not None]
    try:
        ca, key, certificate = (path.read_bytes() for path in files)
    except OSError as error:
        raise RingError(f"cannot read {error.filename}: {error.strerror}") from error
    return ca, key, certificate


def _host_id() -> str:
    """Return an identifier of this host, namespace and user.

    It is equal for all processes of one user that see each other, and for no others.
    """
    boot, processes = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    if not (boot.exists() and processes.exists()):
        return f"{socket.gethostname()}-{os.getpid()}"
    return f"{boot.read_text().strip()}-{processes.stat().st_ino}-{os.getuid()}"
