"""ClientUpdateService: performs what an upload (`fedring.server.update.upload`) asks for."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, aclosing, asynccontextmanager, contextmanager
from typing import Any

import grpc
from grpc import aio

from fedring.codec.errors import CodecError
from fedring.rpc.boundary import require_message
from fedring.rpc.chunks import ReceivedChunk, part_parser, serialize
from fedring.rpc.errors import BadRequest, FedringError, Gone, Overloaded, UnknownRound
from fedring.rpc.streams import METER, TimedStream, write
from fedring.server.config import ServerConfig
from fedring.server.model.versions import ModelVersions
from fedring.server.round.client_reports import ClientReports
from fedring.server.round.rounds import Rounds
from fedring.server.sessions.sessions import Session, Sessions
from fedring.server.state.blob_interfaces import Partial
from fedring.server.state.blobs import MemoryPartial
from fedring.server.state.facts import Facts
from fedring.server.state.failures import StorageError
from fedring.server.state.journal import Journal
from fedring.server.update.acceptance import Acceptor
from fedring.server.update.admission import check_payload
from fedring.server.update.metrics import UpdateMetrics
from fedring.server.update.upload import (
    Accept,
    Accepted,
    Admit,
    Admitted,
    AskRound,
    Chunk,
    Digested,
    Done,
    Effect,
    Ended,
    Event,
    Known,
    LookUp,
    Offered,
    Open,
    Opened,
    Read,
    ReplySent,
    Send,
    TakeDigest,
    TooLate,
    Upload,
    Write,
    Written,
)
from fedring.v1 import federation_pb2 as pb

_Messages = AsyncIterator[pb.ClientUpdate | ReceivedChunk]
SERVICE = "fedring.v1.ClientUpdateService"
_PAUSES = (Send, Done)  # effects that are not performed, but answered
_AT_ONCE = 1 << 18  # so many values are checked sooner than a thread could be found for it


def add_update_service(service: "ClientUpdateService", server: aio.Server) -> None:
    """Add the service to a server in such a way that chunks are read without a copy."""
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
    """Takes updates, in chunks or in one message; a client may repeat any of them."""

    def __init__(
        self,
        rounds: Rounds,
        reports: ClientReports,
        sessions: Sessions,
        acceptor: Acceptor,
        versions: ModelVersions,
        facts: Facts,
        journal: Journal,
        metrics: UpdateMetrics,
        config: ServerConfig,
    ) -> None:
        self._rounds, self._reports, self._sessions = rounds, reports, sessions
        self._acceptor, self._versions = acceptor, versions
        self._facts, self._journal, self._metrics, self._config = facts, journal, metrics, config
        self._slots = asyncio.Semaphore(config.max_transfers)
        self._uploads: dict[str, asyncio.Task[Any]] = {}

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
        """Take the next update, and answer it. Returns False if there is none.

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
                accepted = await self._push_small(session, require_message(request))
            await write(context, accepted, self._config.no_progress_seconds)
        return True

    @contextmanager
    def _counted(self, session: Session, counted: int) -> Iterator[Callable[[], None]]:
        """Count the call's bytes beyond the first `counted`, and its seconds, as the client's in this round."""
        traffic, meter = self._reports.traffic(session.client_id), METER.get()
        began = time.monotonic()

        def count() -> None:
            nonlocal began, counted
            now, received = time.monotonic(), meter.received
            traffic.upload_bytes += received - counted
            traffic.upload_seconds += now - began
            began, counted = now, received

        try:
            with self._reports.transfer(session):
                yield count
        except (CodecError, FedringError, asyncio.CancelledError) as error:
            self._metrics.refused(error)
            raise
        finally:
            count()

    async def _push(self, session: Session, messages: _Messages) -> AsyncGenerator[pb.UpdateReply, None]:
        """Take an update in chunks: yield where the client is to go on, unless it is done, and that it was accepted."""
        first = await anext(messages, None)
        if not isinstance(first, pb.ClientUpdate) or not first.HasField("offer"):
            raise BadRequest("the first message must be an offer")
        call = self._call(session, messages)
        async with call.stack:
            effect = await self._advance(call, Offered(first.offer))
            if isinstance(effect, Send):
                yield pb.UpdateReply(resume_offset=effect.offset)
                effect = await self._advance(call, ReplySent())
        yield pb.UpdateReply(accepted=self._accepted(effect))

    async def _push_small(self, session: Session, update: pb.SmallUpdate) -> pb.Accepted:
        """Take an update that came in one message."""
        call = self._call(session)
        async with call.stack:
            effect = await self._advance(call, Offered(update.offer, update.payload))
        return self._accepted(effect)

    def _call(
        self, session: Session, messages: AsyncIterator[pb.ClientUpdate | ReceivedChunk] | None = None
    ) -> "_Call":
        return _Call(session.client_id, Upload(session.client_id, self._facts.store.epoch), messages)

    def _accepted(self, effect: Effect) -> pb.Accepted:
        if not isinstance(effect, Done):
            raise TypeError(f"an upload ends with {effect}")
        if effect.already:
            self._metrics.repeated()
        return pb.Accepted(already=effect.already)

    async def _advance(self, call: "_Call", event: Event) -> Effect:
        """Perform what the upload asks for after an event, until it is done or has something to send: that is returned.

        This is no generator: small updates are many, and have nothing to send before they are done.
        """
        upload = call.upload
        try:
            effect = upload.handle(event)
            while not isinstance(effect, _PAUSES):
                effect = upload.handle(await self._perform(call, effect))
        except (FedringError, CodecError) as error:
            # Bytes that a decoder refuses are of no use to another attempt, either.
            if upload.spoilt or isinstance(error, CodecError):
                self._discard(call)
            raise
        return effect

    async def _perform(self, call: "_Call", effect: Effect) -> Event:
        """Do what the upload asks for, and return what came of it."""
        client = call.client
        try:
            match effect:
                case LookUp(run_id, number):
                    return Known(await self._accepted_name(run_id, number, client))
                case AskRound(run_id, number):
                    open_ = self._rounds.deliverable(run_id, number, client)
                    return open_.terms(client, self._versions.schema_of(open_.base))
                case Open():
                    return Opened(await self._open(call, effect))
                case Read():
                    return await self._read(call, effect)
                case Write(data):
                    await self._write(call.partial, data)
                    return Written()
                case TakeDigest():
                    return Digested(call.partial.digest)
                case Admit():
                    return await self._admit(call, effect)
                case Accept(row):
                    call.undo.pop_all()  # the acceptor takes the partial over
                    return Accepted(await self._acceptor.accept(call.partial, row))
        except UnknownRound as error:
            return TooLate(error)
        raise TypeError(f"{effect} is no effect of an upload")

    async def _accepted_name(self, run_id: str, number: int, client: str) -> str:
        """Return the name of the update that was accepted of the client for the round; "" if there is none."""
        facts = self._facts
        if run_id != facts.store.run_id or number >= 2**63:
            return ""
        if (open_ := self._rounds.get(number)) is not None:
            return open_.accepted[client].name if client in open_.accepted else ""
        return await facts.db(facts.store.accepted_name, number, client)

    async def _open(self, call: "_Call", effect: Open) -> int:
        """Open a place for the payload until the call's stack is closed. Returns the bytes that it holds already."""
        if not call.opened:
            call.opened = True
            if call.messages is not None:
                await call.stack.enter_async_context(self._slots)
            await call.stack.enter_async_context(self._only_one(call.client))
            call.stack.enter_context(call.undo)
        if not effect.name:  # a small payload is handled in memory, in this thread: another would cost more
            call.partial = MemoryPartial(effect.payload or b"")
            return call.partial.size

        def open_() -> None:  # all of it in the thread: the call may have ended when the file is open
            call.undo.close()
            call.partial = partial = self._facts.blobs.open_partial(effect.name, fresh=effect.fresh)
            call.undo.callback(partial.close)

        try:
            await self._facts.work(open_)
        except StorageError as error:
            raise Overloaded(str(error), reason=error.reason) from error
        return call.partial.size

    async def _read(self, call: "_Call", effect: Read) -> Event:
        message = call.newest = await anext(call.messages, None) if call.messages is not None else None
        if message is None:
            return Ended()
        self._rounds.deliverable(effect.run_id, effect.round, call.client)  # an upload does not outlive its round
        chunk = message if isinstance(message, ReceivedChunk) else message.chunk
        return Chunk(chunk.offset, chunk.data)

    async def _write(self, partial: Partial, data: bytes | memoryview) -> None:
        try:
            if isinstance(partial, MemoryPartial):
                partial.write(data)
            else:
                await self._facts.work(partial.write, data)
        except StorageError as error:
            raise Overloaded(str(error), reason=error.reason) from error

    async def _admit(self, call: "_Call", effect: Admit) -> Admitted:
        """Check every byte of the payload."""
        partial, schema, packets = call.partial, effect.schema, effect.packets
        small = isinstance(partial, MemoryPartial)
        try:
            # How long the check takes depends on the model: a few bytes can stand for many values.
            if small and len(packets) * (schema.num_parameters + schema.num_buffers) <= _AT_ONCE:
                norm = check_payload(partial.read, packets, schema, effect.exact, effect.width)
            else:
                norm = await self._facts.work(check_payload, partial.read, packets, schema, effect.exact, effect.width)
        except CodecError as error:
            text = f"an update of {call.client} was refused: {error}"
            self._journal.write("update_refused", text, client_id=call.client)
            raise
        return Admitted(norm, time.time(), partial.read(0, partial.size) if small else b"")

    def _discard(self, call: "_Call") -> None:
        if not isinstance(call.partial, MemoryPartial):
            self._facts.blobs.abort(call.partial)

    @asynccontextmanager
    async def _only_one(self, client_id: str) -> AsyncIterator[None]:
        """Let no other upload of the client run inside: end an older one, whose stream is dead."""
        if (older := self._uploads.get(client_id)) is not None:
            older.cancel()
            await asyncio.wait([older])
        if client_id in self._uploads:
            raise Overloaded(f"an older upload of {client_id} has not ended yet")
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("an upload runs in no task")
        self._uploads[client_id] = task
        try:
            yield
        finally:
            del self._uploads[client_id]


class _Call:
    """What one call keeps of its upload."""

    def __init__(
        self, client: str, upload: Upload, messages: AsyncIterator[pb.ClientUpdate | ReceivedChunk] | None
    ) -> None:
        self.client, self.upload = client, upload
        self.messages = messages  # None if the payload came with its offer
        self.partial: Partial = MemoryPartial()
        self.stack = AsyncExitStack()  # gives back what the call holds while its upload is open
        self.undo = ExitStack()  # closes the partial
        self.opened = False
        # The newest message is kept until the next one is here. If its memory were free meanwhile, the C library would
        # give it back to the system, and ask for it again: 7 % of the server's CPU in a round of large updates.
        self.newest: pb.ClientUpdate | ReceivedChunk | None = None


async def _end(closed: asyncio.Event, at_work: asyncio.Lock) -> None:
    """Raise Gone when the session is closed, but not while an update is at work. Watch tells the client why."""
    await closed.wait()
    async with at_work:
        raise Gone("the session was closed")
