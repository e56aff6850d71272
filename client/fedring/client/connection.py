"""The channel to fl-server, and the session that every call on it names."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from grpc import StatusCode, aio

from fedring.client.errors import Refused
from fedring.client.metrics import Metrics
from fedring.daemon.exits import Exit
from fedring.daemon.tracing import trace_metadata
from fedring.rpc.channel import open_channel
from fedring.rpc.chunks import part_parser, serialize
from fedring.rpc.contract import PROTOCOL, SESSION_KEY
from fedring.rpc.errors import Unavailable, reason_of, status_of
from fedring.rpc.metrics import counted
from fedring.v1 import federation_pb2 as pb
from fedring.v1.federation_pb2_grpc import ClientUpdateServiceStub, TrainCmdServiceStub
from fedring.v1.rendezvous_pb2_grpc import RendezvousServiceStub
from fedring.version import SOFTWARE

CALL_SECONDS = 10.0
"""Deadline of a call that moves no payload."""

_FINAL = {
    StatusCode.INVALID_ARGUMENT: Exit.CONFIG,
    StatusCode.FAILED_PRECONDITION: Exit.CONFIG,
    StatusCode.PERMISSION_DENIED: Exit.NOT_ALLOWED,
}


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

    def __init__(self, address: str, client_id: str, metrics: Metrics) -> None:
        self.address = address
        self.metrics = metrics
        self.client_id = client_id
        self._channel = counted(open_channel(address), metrics.calls)
        self.commands = TrainCmdServiceStub(self._channel)
        # Not by the generated stubs: chunks are made and read without protobuf's copies.
        self.fetch_model = self._channel.unary_stream(
            "/fedring.v1.ModelBlobService/FetchModel",
            request_serializer=serialize,
            response_deserializer=part_parser(pb.ModelBlob),
        )
        self.push_update = self._channel.stream_stream(
            "/fedring.v1.ClientUpdateService/PushUpdate",
            request_serializer=serialize,
            response_deserializer=pb.UpdateReply.FromString,
        )
        self.rendezvous = RendezvousServiceStub(self._channel)
        self.updates = ClientUpdateServiceStub(self._channel)  # for small ones
        self.session = pb.JoinReply()  # of the newest Join
        self.spoke = 0.0  # when a call that is no heartbeat last went well, monotonic seconds
        self._changed = asyncio.Condition()
        self._refused = ""  # the last session that a call was refused for

    async def join(self, *, wait: bool) -> pb.JoinReply:
        """Open a session; Refused if this client will never get one. With `wait`, be patient with a silent server."""
        request = pb.JoinRequest(client_id=self.client_id, protocol=PROTOCOL, software=SOFTWARE)
        try:
            session = await self.commands.Join(request, timeout=CALL_SECONDS, wait_for_ready=wait)
        except aio.AioRpcError as error:
            if exit_code := _FINAL.get(status_of(error)):
                raise Refused(
                    f"fl-server at {self.address} refused this client ({reason_of(error)}): {error.details()}",
                    exit_code,
                ) from error
            raise
        if self.session.session_id:
            self.metrics.reconnects.inc()
        async with self._changed:
            self.session = session
            self._changed.notify_all()
        return session

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Names the session, and the span that the call belongs to."""
        return ((SESSION_KEY, self.session.session_id), *trace_metadata())

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
        await self._channel.close()
