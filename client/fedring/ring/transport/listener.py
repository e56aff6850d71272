"""The port of a worker, and the check of callers.

It serves the streams and pulses of all peers.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NoReturn

import grpc

from fedring.daemon.config import ConfigError
from fedring.ring.errors import RingError
from fedring.ring.options import RingOptions
from fedring.ring.transport.channels import (
    EXCHANGE,
    FRAME_OPTIONS,
    GENERATION_KEY,
    PEER_KEY,
    PULSE,
    channel_options,
    hold_pulse,
    server_credentials,
)
from fedring.ring.transport.interface import Traffic
from fedring.ring.transport.receiver import Receiver
from fedring.rpc.errors import REASON_KEY
from fedring.rpc.identity import certified, peer_name
from fedring.rpc.revocation import Revocations, shown

log = logging.getLogger(__name__)

_MAX_STREAMS = 1024
_PATIENCE = 60.0  # seconds that a stream waits until the members are known

Exchange = Callable[[Iterator[bytes], grpc.ServicerContext], bytes]


class Members:
    """The identities whose certificates may open streams.

    With the option tls_members_only, these are the group's members.

    Until the members are known, every stream waits.
    """

    def __init__(self, *, members_only: bool) -> None:
        self.members_only = members_only
        self._identities: Mapping[str, str] = {}
        self._decided = threading.Event()

    def expect(self, identities: Mapping[str, str]) -> None:
        """Set the members: their identities (URIs in certificates) by their addresses."""
        self._identities = dict(identities)
        self._decided.set()

    @property
    def known(self) -> bool:
        """Whether streams can be admitted."""
        return not self.members_only or bool(self._identities)

    def close(self) -> None:
        """Wake the streams that wait, and admit no more members."""
        self._decided.set()

    def admits(self, address: str, context: Any) -> bool:
        """Return whether the caller may speak for a peer.

        Args:
            address: The peer's address; "" = that of any member.
            context: The caller's call.
        """
        if not self.members_only:
            return True
        self._decided.wait(_PATIENCE)
        caller = certified(context)
        members = [self._identities.get(address, "")] if address else self._identities.values()
        return caller is not None and str(caller) in members

    def name_of(self, address: str) -> str:
        """Return the name that the peer's certificate must carry; "" = any."""
        identity = self._identities.get(address, "")
        return peer_name(identity) if identity else ""


class PeerService:
    """Serves the streams of all peers.

    It refuses those of other generations and of strangers, and hands on the others.

    Args:
        options: The worker's options.
        generation: Streams of another generation are refused.
        members: Who may open streams.
        traffic: Counts received frames and refused streams.
        serve: Called with a peer's address and its `Receiver`, on the stream's own thread. The stream ends when it
            returns.

    Raises:
        RingError: The list of revoked certificates cannot be used.
    """

    def __init__(
        self,
        options: RingOptions,
        *,
        generation: int,
        members: Members,
        traffic: Traffic,
        serve: Callable[[str, Receiver], None],
    ) -> None:
        self._generation = generation
        self._checksum = options.frame_checksum
        self._members = members
        self._traffic = traffic
        self._serve = serve
        try:
            self._revocations = Revocations(options.tls_crl, options.tls_ca)
        except ConfigError as error:
            raise RingError(str(error)) from error

    def exchange(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        """Serve the stream of one peer."""
        metadata = dict(context.invocation_metadata())
        peer = str(metadata.get(PEER_KEY, ""))
        if metadata.get(GENERATION_KEY) != str(self._generation):
            self._traffic.dropped_frames += 1
            context.set_trailing_metadata(((REASON_KEY, "stale_generation"),))
            # Its number is not told: a script's ranks draw it at random, and a stranger who knows it could take part.
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this worker is in another generation")
        if not peer:  # see is_serving
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the stream has no {PEER_KEY}")
        self._check(peer, peer, context)
        receiver = Receiver(messages, generation=self._generation, checksum=self._checksum, traffic=self._traffic)
        if not context.add_callback(receiver.end):
            receiver.end()
        try:
            self._serve(peer, receiver)
        finally:
            receiver.close()
        return b""

    def pulse(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        """Serve the pulse of one peer."""
        self._check("", "a pulse", context)
        return hold_pulse(request, context)

    def _check(self, address: str, caller: str, context: grpc.ServicerContext) -> None:
        """End a call whose certificate is revoked or no member's.

        Nothing of the call has been read.
        """
        if not self._members.admits(address, context):
            self._refuse(caller, context, "not_a_member", "is not a member's")
        if self._revocations.holds(shown(context)):
            self._refuse(caller, context, "revoked_certificate", "was revoked")

    def _refuse(self, caller: str, context: grpc.ServicerContext, reason: str, why: str) -> NoReturn:
        self._traffic.refused_streams += 1
        log.warning("%s, from %s, was refused: its certificate %s", caller, context.peer(), why)
        context.set_trailing_metadata(((REASON_KEY, reason),))
        context.abort(grpc.StatusCode.PERMISSION_DENIED, f"this certificate {why}")


class Listener:
    """A server on the options' port.

    It listens at once, and serves from `start` on.

    Args:
        options: Where to listen, and TLS.
        exchange: Serves streams of frames.
        pulse: Serves pulses.

    Raises:
        RingError: The port is taken, or a file of the TLS options cannot be read.
    """

    def __init__(
        self,
        options: RingOptions,
        exchange: Exchange,
        pulse: Callable[[bytes, grpc.ServicerContext], bytes] = hold_pulse,
    ) -> None:
        self._server = grpc.server(
            _ThreadPerStream(),
            [_handler(exchange, pulse)],
            options=[*channel_options(), *FRAME_OPTIONS],
            maximum_concurrent_rpcs=_MAX_STREAMS,
        )
        credentials = server_credentials(options)
        try:
            if credentials is None:
                self.port = self._server.add_insecure_port(options.listen)
            else:
                self.port = self._server.add_secure_port(options.listen, credentials)
        # gRPC raises RuntimeError, not OSError, if the port is taken.
        except RuntimeError as error:
            raise RingError(f"cannot listen on {options.listen}: {error}") from error

    def start(self) -> None:
        """Serve peers."""
        self._server.start()

    def close(self) -> None:
        """End all streams, and free the port."""
        self._server.stop(0).wait(5)


class _ThreadPerStream(ThreadPoolExecutor):
    """An executor with one daemon thread for each call.

    A worker that forgets to close can still exit.
    """

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001  # handed to the caller that waits, as executors do
                future.set_exception(error)

        threading.Thread(target=run, name="ring-stream", daemon=True).start()
        return future


def _handler(exchange: Exchange, pulse: Callable[[bytes, grpc.ServicerContext], bytes]) -> grpc.GenericRpcHandler:
    _, service, method = EXCHANGE.split("/")
    methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        method: grpc.stream_unary_rpc_method_handler(exchange),
        PULSE.rpartition("/")[2]: grpc.unary_unary_rpc_method_handler(pulse),
    }
    return grpc.method_handlers_generic_handler(service, methods)
