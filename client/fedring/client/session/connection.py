"""The connection to fl-server, and the session that every call names."""

import asyncio
import gc
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from itertools import cycle
from pathlib import Path
from typing import Any

from grpc import StatusCode, aio

from fedring.client.config import ClientConfig
from fedring.client.errors import Refused
from fedring.client.metrics import ClientMetrics
from fedring.client.session.resume_secret import ResumeSecret
from fedring.daemon.config import ConfigError
from fedring.daemon.exits import Exit
from fedring.daemon.tracing import trace_metadata
from fedring.rpc.channel import encrypts, open_channel
from fedring.rpc.chunks import part_parser, serialize
from fedring.rpc.contract import PROTOCOL, SESSION_KEY
from fedring.rpc.errors import OldTerm, Standby, Unavailable, leader_in, reason_of, status_of
from fedring.rpc.handshake import diagnose
from fedring.rpc.leader_term import NewestTerm, refusing_old_terms
from fedring.rpc.metrics import counted
from fedring.rpc.probe import Listener, listener_at, proxy_for
from fedring.rpc.tls import read_token
from fedring.v1 import federation_pb2 as pb
from fedring.v1.federation_pb2_grpc import ClientUpdateServiceStub, TrainCmdServiceStub
from fedring.v1.rendezvous_pb2_grpc import RendezvousServiceStub
from fedring.version import SOFTWARE

log = logging.getLogger(__name__)

CALL_SECONDS = 10.0
"""The deadline of a call that moves no payload."""

_START_FIELD = 19  # of /proc/self/stat, counted after the name, which may hold spaces: clock ticks since the boot
_TICKS = 100.0  # per second, on every Linux

Metadata = tuple[tuple[str, str], ...]

_NO_CALL: tuple[Metadata, Any] = ((), None)
_FINAL = {
    StatusCode.INVALID_ARGUMENT: Exit.CONFIG,
    StatusCode.FAILED_PRECONDITION: Exit.CONFIG,
    StatusCode.PERMISSION_DENIED: Exit.NOT_ALLOWED,
    StatusCode.UNAUTHENTICATED: Exit.NOT_ALLOWED,
}


_NOBODY = (StatusCode.UNAVAILABLE, StatusCode.DEADLINE_EXCEEDED)


@contextmanager
def stray_cancellation() -> Iterator[None]:
    """Raise Unavailable for a cancellation that nobody has asked for.

    Before Python 3.13, a timeout that fires at the very moment at which its body ends leaves a cancellation behind. The
    next await then raises it, as if the task were to end.
    """
    try:
        yield
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise Unavailable("a timeout fired as the call ended") from None


class Connection:
    """The calls to one server, over one channel or its successors.

    ServerLink owns it, and uses it on its event loop only.

    Args:
        config: Names the server, the certificates, the token and the state folder.
        metrics: Where calls and reconnects are counted.

    Raises:
        ConfigError: If a certificate cannot be used.
        OSError: If a file of a certificate is missing.
    """

    def __init__(self, config: ClientConfig, metrics: ClientMetrics) -> None:
        self._servers, self._addresses = config.servers, cycle(config.servers)
        self._waits = not config.other_servers  # else another address may answer meanwhile
        self.address = next(self._addresses)
        self.encrypted = encrypts(config.server, config.tls)
        self.client_id = config.client_id
        self.metrics = metrics
        self.session = pb.JoinReply()  # the answer to the newest Join
        self.last_accepted = pb.LastAccepted()  # as the server said in Join, or since then by accepting an update
        self.audited = self.audit_head = ""  # the newest accepted update, and the head of the server's log then
        self.last_success = 0.0  # when a call other than a heartbeat last succeeded, in monotonic seconds
        self._changed = asyncio.Condition()
        self._refused = ""  # the newest session for which the server has refused a call
        self._tls, self._token_file = config.tls, config.token_file
        self._resume, self._labels = ResumeSecret(config.state_dir), config.labels
        self._newest_term = NewestTerm(config.state_dir / "leader_term")
        self.max_jobs = config.max_jobs
        self._authorization: Metadata = ()
        self._small = _NO_CALL  # the metadata and the open call of small updates, while nobody uses it
        self._channels: list[aio.Channel] = []  # the newest is last; the one before it may still have calls
        self._watch_channel: aio.Channel | None = None  # the one that carries the session's stream
        self._startup = _startup_seconds()
        self.reopen()

    def reopen(self) -> None:
        """Open a new channel for all new calls.

        It uses the certificates as they are on disk now.

        Raises:
            ConfigError: If a certificate cannot be used.
            OSError: If a file of a certificate is missing.
        """
        stamp = self._tls.stamp()
        opened = open_channel(self.address, self._tls, own_connection=bool(self._channels))
        self._stamp = stamp  # Only now, so that files which cannot be used yet are looked at again.
        checked = refusing_old_terms(opened, self._newest_term)
        self.channel = channel = counted(checked, self.metrics.calls)  # for calls that only some kinds of rounds make
        self._channels.append(channel)
        self.commands = TrainCmdServiceStub(channel)
        # The generated stubs are not used for these, because protobuf would copy the chunks.
        self.fetch_model = channel.unary_stream(
            "/fedring.v1.ModelBlobService/FetchModel",
            request_serializer=serialize,
            response_deserializer=part_parser(pb.ModelBlob),
        )
        self.push_update = channel.stream_stream(
            "/fedring.v1.ClientUpdateService/PushUpdate",
            request_serializer=serialize,
            response_deserializer=pb.UpdateReply.FromString,
        )
        self.rendezvous = RendezvousServiceStub(channel)
        self._push_small = ClientUpdateServiceStub(channel).PushSmallUpdates

    async def _refresh(self) -> None:
        """Read the token and the certificates again if their files have changed."""
        try:
            if self._token_file:
                self._authorization = (("authorization", f"Bearer {read_token(self._token_file)}"),)
            if self._tls.stamp() != self._stamp:
                self.reopen()
        except (ConfigError, OSError) as error:  # The files are being written: the next session looks again.
            log.warning("the new certificate or token cannot be used, so the old one stays in use: %s", error)
        self._watch_channel = None
        await self._close_unused()

    async def reconnect(self) -> None:
        """Use a new connection for all new calls.

        Calls in progress stay on the old one. If that is impossible because of a certificate, a warning is logged and
        nothing changes.
        """
        try:
            self.reopen()
        except (ConfigError, OSError) as error:  # as above
            log.warning("no new connection can be opened, so the old one stays in use: %s", error)
        await self._close_unused()

    async def _close_unused(self) -> None:
        """Close the channels that have no calls any more.

        These are all but the newest two and the one of the session's stream.
        """
        unused = [channel for channel in self._channels[:-2] if channel is not self._watch_channel]
        self._channels = [channel for channel in self._channels if channel not in unused]
        for channel in unused:
            await channel.close()
        if unused:
            gc.collect()  # A finished call of grpc.aio is part of a reference cycle, which holds the connection.

    async def hang_up(self) -> None:
        """End all connections; the next call makes a new one."""
        old, self._channels = self._channels, []
        try:
            self.reopen()
        except (ConfigError, OSError) as error:  # as above
            log.warning("no new connection can be opened, so the old one stays: %s", error)
            self._channels = old
            return
        self._watch_channel = None
        for channel in old:
            await channel.close()
        gc.collect()  # as above

    async def join(self, *, wait: bool) -> pb.JoinReply:
        """Open a session.

        Args:
            wait: Whether to wait for a server that cannot be reached, up to the deadline of the call. If it has several
                addresses, the next one is asked instead, by the next call.

        Returns:
            The server's answer, which is also `session` from now on.

        Raises:
            Refused: If the server will never give this client a session.
            OldTerm: If the server has been replaced.
            AioRpcError: If the call failed for another reason.
        """
        await self._refresh()
        request = pb.JoinRequest(
            client_id=self.client_id,
            protocol=PROTOCOL,
            software=SOFTWARE,
            startup_seconds=self._startup,
            resume_secret=self._resume.text,
            labels=self._labels,
            max_jobs=self.max_jobs,
            paced=True,
        )
        wait = wait and self._waits
        call = self.commands.Join(request, metadata=self._authorization, timeout=CALL_SECONDS, wait_for_ready=wait)
        try:
            session = await call
        except (aio.AioRpcError, OldTerm) as error:
            # Of one address, a balancer may choose another server.
            replaced = reason_of(error) in (OldTerm.reason, Standby.reason)
            if replaced or (not self._waits and status_of(error) in _NOBODY):
                self.address = self._next_address(error)
                await self.hang_up()
            if isinstance(error, OldTerm):
                raise
            if exit_code := _FINAL.get(status_of(error)):
                raise Refused(
                    f"fl-server at {self.address} refused this client ({reason_of(error)}): {error.details()}",
                    exit_code,
                ) from error
            raise
        self._resume.keep(session.resume_secret)
        if self.session.session_id:
            self.metrics.reconnects.inc()
        async with self._changed:
            self.session, self.last_accepted = session, session.last_accepted
            self._watch_channel = self._channels[-1]
            self._changed.notify_all()
        return session

    def _next_address(self, error: aio.AioRpcError | OldTerm) -> str:
        """Return the address to ask next: the leader's, if it is known."""
        named = leader_in(error) if isinstance(error, aio.AioRpcError) else ""
        return named if named in self._servers else next(self._addresses)

    @property
    def metadata(self) -> Metadata:
        """The metadata of every call.

        It has the session, the token if there is one, and the span if calls are traced.
        """
        return ((SESSION_KEY, self.session.session_id), *self._authorization, *trace_metadata())

    def obstacle(self, lost: Exception) -> str:
        """Return why no call arrives at the server.

        This takes seconds: not for the event loop.

        Args:
            lost: The error of a call.
        """
        details = (lost.details() or "") if isinstance(lost, aio.AioRpcError) else str(lost)
        if not self.encrypted:
            tls = "it speaks TLS: set tls.ca, and tls.cert with tls.key or token_file"
            return tls if listener_at(self.address) is Listener.TLS else details
        if "WRONG_VERSION_NUMBER" in details:
            return (
                "it speaks plaintext, and this client uses TLS: check the addresses and the table `tls` of both sides"
            )
        # gRPC says "Socket closed" of a server that rejects a certificate.
        if listener_at(self.address) is Listener.TLS or proxy_for(self.address):
            found = diagnose(self.address, self._tls, CALL_SECONDS)
            return f"{found.found}: {found.advice}"
        return details

    @asynccontextmanager
    async def small_updates(self) -> AsyncIterator[Any]:
        """Provide an open PushSmallUpdates call of this session.

        It stays open for the next use. The body must read an answer for everything that it sends. An error in the body
        cancels the call. If calls are traced, the call belongs to one span and ends with the body.
        """
        (metadata, call), self._small = self._small, _NO_CALL
        if metadata != self.metadata or call.done():
            if call:
                call.cancel()
            metadata = self.metadata
            call = self._push_small(metadata=metadata)
        try:
            yield call
        except BaseException:
            call.cancel()
            raise
        if trace_metadata():
            with suppress(TimeoutError):
                async with asyncio.timeout(CALL_SECONDS):
                    await call.done_writing()
        else:
            self._small = metadata, call

    @property
    def session_refused(self) -> bool:
        """Whether the server has refused a call of the current session.

        A new session is needed then.
        """
        return bool(self._refused) and self._refused == self.session.session_id

    async def wait_for_new_session(self, session_id: str) -> None:
        """Wait for a session that replaces a refused one.

        This notes first that the server has refused a call of that session.
        """
        self._refused = session_id
        async with self._changed:
            await self._changed.wait_for(lambda: self.session.session_id not in ("", session_id))

    async def close(self) -> None:
        """End all calls."""
        for channel in self._channels:
            await channel.close()


def _startup_seconds() -> float:
    """Return the seconds since this process was started.

    0 if the system does not tell.
    """
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[_START_FIELD]) / _TICKS)
    except (OSError, AttributeError, IndexError, ValueError):
        return 0.0
