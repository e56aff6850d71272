"""ClientUpdateService: clients push their updates, in chunks or in one message."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self

import grpc
from grpc import aio

from fedring.codec.errors import CodecError
from fedring.rpc.boundary import require_message
from fedring.rpc.chunks import ReceivedChunk, part_parser, serialize
from fedring.rpc.errors import BadRequest, FedringError, Gone
from fedring.rpc.streams import METER, TimedStream, answer
from fedring.server.config import ServerConfig
from fedring.server.running.client_reports import ClientReports
from fedring.server.service.upload_calls import UploadCalls
from fedring.server.sessions.sessions import Session, Sessions
from fedring.server.update.metrics import UpdateMetrics
from fedring.server.update.upload import (
    Done,
    Effect,
    Offered,
    ReplySent,
    Send,
)
from fedring.v1 import federation_pb2 as pb

_Messages = AsyncIterator[pb.ClientUpdate | ReceivedChunk]
SERVICE = "fedring.v1.ClientUpdateService"


def add_update_service(service: "ClientUpdateService", server: aio.Server) -> None:
    """Add the service to a server, with chunks read without copies."""
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "PushUpdate": grpc.stream_stream_rpc_method_handler(
            service.PushUpdate, request_deserializer=part_parser(pb.ClientUpdate), response_serializer=serialize
        ),
        "PushSmallUpdates": grpc.stream_stream_rpc_method_handler(
            service.PushSmallUpdates, request_deserializer=pb.SmallUpdate.FromString, response_serializer=serialize
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


class ClientUpdateService:
    """Receives updates, in chunks or in one message.

    A client may repeat any of them.
    """

    def __init__(
        self,
        calls: UploadCalls,
        reports: ClientReports,
        sessions: Sessions,
        metrics: UpdateMetrics,
        config: ServerConfig,
    ) -> None:
        self._calls, self._reports, self._sessions = calls, reports, sessions
        self._metrics, self._config = metrics, config

    async def PushUpdate(self, request_iterator: _Messages, context: Any) -> AsyncIterator[pb.UpdateReply]:
        session = self._sessions.of(context)
        with self._counted(session, 0) as count:
            messages = TimedStream(request_iterator, self._config.no_progress_seconds)
            async with aclosing(self._push(session, messages)) as replies:
                async for reply in replies:
                    count()  # before the client knows that its update was accepted: the round may end at once
                    yield reply

    async def PushSmallUpdates(self, request_iterator: AsyncIterator[pb.SmallUpdate], context: Any) -> None:
        session = self._sessions.of(context)
        at_work = asyncio.Lock()
        try:
            async with asyncio.TaskGroup() as tasks:
                ending = tasks.create_task(_end(session.closed, at_work))
                while await self._take_small(session, at_work, context):
                    pass
                ending.cancel()
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _take_small(self, session: Session, at_work: asyncio.Lock, context: Any) -> bool:
        """Receive the next update, and answer it.

        Returns False if there is none.

        It is not read by the iterator, which would hold each update in memory until the next one comes.
        """
        seen = METER.get().received
        request = await context.read()
        if request is aio.EOF:
            return False
        async with at_work:
            if session.closed.is_set():
                raise Gone("the session was closed")
            session.hear()
            with self._counted(session, seen):
                update = require_message(request)
                accepted = self._accepted(await self._calls.take(session.client_id, update.offer, update.payload))
            await answer(context, accepted, self._config.no_progress_seconds)
        return True

    def _counted(self, session: Session, counted: int) -> "_Counted":
        return _Counted(session, counted, self._reports, self._metrics)

    async def _push(self, session: Session, messages: _Messages) -> AsyncGenerator[pb.UpdateReply, None]:
        """Receive an update in chunks, and yield the answers.

        They say where the client is to continue, unless it is done, and that the update was accepted.
        """
        first = await anext(messages, None)
        if not isinstance(first, pb.ClientUpdate) or not first.HasField("offer"):
            raise BadRequest("the first message must be an offer")
        call = self._calls.call(session.client_id, messages)
        async with call.stack:
            effect = await self._calls.advance(call, Offered(first.offer))
            if isinstance(effect, Send):
                yield pb.UpdateReply(resume_offset=effect.offset)
                effect = await self._calls.advance(call, ReplySent())
        yield pb.UpdateReply(accepted=self._accepted(effect))

    def _accepted(self, effect: Effect) -> pb.Accepted:
        if not isinstance(effect, Done):
            raise TypeError(f"an upload ends with {effect}")
        if effect.already:
            self._metrics.repeated()
        return pb.Accepted(already=effect.already, audit_head=effect.head)


class _Counted:
    """Counts a call's bytes and seconds as the client's in this round.

    It is a context manager of its own, since one from a generator takes three times as long, and updates are many.

    Args:
        session: of the client.
        counted: how many of the call's bytes are left out, because they were counted before.
        reports: keep the counters.
        metrics: are told of an upload that is refused or interrupted within.
    """

    __slots__ = ("_began", "_counted", "_meter", "_metrics", "_traffic", "_transfer")

    def __init__(self, session: Session, counted: int, reports: ClientReports, metrics: UpdateMetrics) -> None:
        self._traffic, self._transfer = reports.traffic(session.client_id), reports.transfer(session)
        self._counted, self._metrics, self._meter = counted, metrics, METER.get()
        self._began = time.monotonic()

    def __call__(self) -> None:
        """Count up to now."""
        now, received = time.monotonic(), self._meter.received
        self._traffic.upload_bytes += received - self._counted
        self._traffic.upload_seconds += now - self._began
        self._began, self._counted = now, received

    def __enter__(self) -> Self:
        self._transfer.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._transfer.__exit__(kind, error, tb)
        if isinstance(error, CodecError | FedringError | asyncio.CancelledError):
            self._metrics.refused(error)
        self()  # bytes of a refused or broken upload have crossed the network, too


async def _end(closed: asyncio.Event, at_work: asyncio.Lock) -> None:
    """Raise Gone when the session is closed, between two updates.

    An update at work is not interrupted. Watch tells the client why.
    """
    await closed.wait()
    async with at_work:
        raise Gone("the session was closed")
