"""The channel to fl-server, and the session that every call on it names."""

import asyncio
import gc
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
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
from fedring.rpc.channel import open_channel
from fedring.rpc.chunks import part_parser, serialize
from fedring.rpc.contract import PROTOCOL, SESSION_KEY
from fedring.rpc.errors import FedringError, Unavailable, reason_of, status_of
from fedring.rpc.metrics import counted
from fedring.rpc.tls import read_token
from fedring.v1 import federation_pb2 as pb
from fedring.v1.federation_pb2_grpc import ClientUpdateServiceStub, TrainCmdServiceStub
from fedring.v1.rendezvous_pb2_grpc import RendezvousServiceStub
from fedring.version import SOFTWARE

log = logging.getLogger(__name__)

CALL_SECONDS = 10.0
"""Deadline of a call that moves no payload."""

_DOUBTFUL = {StatusCode.UNIMPLEMENTED, StatusCode.INTERNAL, StatusCode.UNKNOWN, StatusCode.DEADLINE_EXCEEDED}

_STARTED = 19  # field of /proc/self/stat after the name, which may hold spaces: clock ticks since the boot
_TICKS = 100.0  # a second, on every Linux

Metadata = tuple[tuple[str, str], ...]

_NO_CALL: tuple[Metadata, Any] = ((), None)
_FINAL = {
    StatusCode.INVALID_ARGUMENT: Exit.CONFIG,
    StatusCode.FAILED_PRECONDITION: Exit.CONFIG,
    StatusCode.PERMISSION_DENIED: Exit.NOT_ALLOWED,
    StatusCode.UNAUTHENTICATED: Exit.NOT_ALLOWED,
}


def is_doubtful(error: aio.AioRpcError | FedringError) -> bool:
    """Return whether a call failed as calls do on a connection that is of no use any more.

    Both its sides number the calls, and remember parts of their heads. One bit of a head that is flipped on its way can
    have the server misread every further call, or not notice them, while those in progress go on as ever.
    """
    return status_of(error) in _DOUBTFUL


@contextmanager
def stray_cancellation() -> Iterator[None]:
    """Inside, a cancellation that nobody asked for raises Unavailable.

    Before Python 3.13, a timeout that fires in the instant in which its body ends leaves a cancellation behind, and the
    next await raises it, as if this task were to end.
    """
    try:
        yield
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise Unavailable("a timeout fired as the call ended") from None


class Connection:
    """The three services of one server; belongs to the event loop that made it."""

    def __init__(self, config: ClientConfig, metrics: ClientMetrics) -> None:
        self.address = config.server
        self.client_id = config.client_id
        self.metrics = metrics
        self.session = pb.JoinReply()  # of the newest Join
        self.last_accepted = pb.LastAccepted()  # by what the server has said, in Join or in answer to an update
        self.spoke = 0.0  # when a call that is no heartbeat last went well, monotonic seconds
        self._changed = asyncio.Condition()
        self._refused = ""  # the last session that a call was refused for
        self._tls, self._token_file = config.tls, config.token_file
        self._resume = ResumeSecret(config.state_dir)
        self._authorization: Metadata = ()
        self._small = _NO_CALL  # for small updates, which waits for the next one; and its metadata
        self._channels: list[aio.Channel] = []  # the newest is last; the one before may still have calls
        self._watched: aio.Channel | None = None  # that of the session's stream
        self._startup = _startup_seconds()
        self.reopen()

    def reopen(self) -> None:
        """New calls go over a new channel, with the certificate and the token as they are on disk now."""
        stamp = self._tls.stamp()
        opened = open_channel(self.address, self._tls, own_connection=bool(self._channels))
        self._stamp = stamp  # not before: files that cannot be used are looked at again
        channel = counted(opened, self.metrics.calls)
        self._channels.append(channel)
        self.commands = TrainCmdServiceStub(channel)
        # Not by the generated stubs: chunks are made and read without protobuf's copies.
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
        """What proves who this client is is as new as the files."""
        try:
            if self._token_file:
                self._authorization = (("authorization", f"Bearer {read_token(self._token_file)}"),)
            if self._tls.stamp() != self._stamp:
                self.reopen()
        except (ConfigError, OSError) as error:  # they are being written: the next session looks again
            log.warning("the new certificate or token cannot be used, the old one stays: %s", error)
        self._watched = None
        await self._close_unused()

    async def reconnect(self) -> None:
        """New calls go over a new connection; those in progress stay where they are."""
        try:
            self.reopen()
        except (ConfigError, OSError) as error:  # as above
            log.warning("there is no new connection, the old one stays: %s", error)
        await self._close_unused()

    async def _close_unused(self) -> None:
        """Close the channels that have no calls any more: all but the newest two, and that of the session's stream."""
        unused = [channel for channel in self._channels[:-2] if channel is not self._watched]
        self._channels = [channel for channel in self._channels if channel not in unused]
        for channel in unused:
            await channel.close()
        if unused:
            gc.collect()  # a call of grpc.aio that is done holds itself, and its connection with it

    async def join(self, *, wait: bool) -> pb.JoinReply:
        """Open a session; Refused if this client will never get one. With `wait`, be patient with a silent server."""
        await self._refresh()
        request = pb.JoinRequest(
            client_id=self.client_id,
            protocol=PROTOCOL,
            software=SOFTWARE,
            startup_seconds=self._startup,
            resume_secret=self._resume.text,
        )
        call = self.commands.Join(request, metadata=self._authorization, timeout=CALL_SECONDS, wait_for_ready=wait)
        try:
            session = await call
        except aio.AioRpcError as error:
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
            self._watched = self._channels[-1]
            self._changed.notify_all()
        return session

    @property
    def metadata(self) -> Metadata:
        """Names the session and the span that the call belongs to, and shows the token if there is one."""
        return ((SESSION_KEY, self.session.session_id), *self._authorization, *trace_metadata())

    @asynccontextmanager
    async def small_updates(self) -> AsyncIterator[Any]:
        """A PushSmallUpdates call of this session, the same each time; all that is sent inside must be answered inside.

        An error inside ends it, and so does the end of its use if it belongs to a span.
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
    def stale(self) -> bool:
        """Whether the server does not know the session any more, so that a new one is needed."""
        return bool(self._refused) and self._refused == self.session.session_id

    async def renewed(self, session_id: str) -> None:
        """That session was refused: return when there is another one."""
        self._refused = session_id
        async with self._changed:
            await self._changed.wait_for(lambda: self.session.session_id not in ("", session_id))

    async def close(self) -> None:
        """End every call."""
        for channel in self._channels:
            await channel.close()


def _startup_seconds() -> float:
    """Return the seconds since this process was started; 0 where the system does not tell."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[_STARTED]) / _TICKS)
    except (OSError, AttributeError, IndexError, ValueError):
        return 0.0
