"""The service that takes updates: header first, then bytes, then one durable acceptance."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import ExitStack, aclosing, asynccontextmanager, contextmanager
from typing import Any

import grpc
from grpc import aio

from fedring.codec.digest import name_of
from fedring.codec.errors import CodecError
from fedring.codec.schema import Schema
from fedring.rpc.boundary import require_message
from fedring.rpc.chunks import CHUNK_BYTES, ReceivedChunk, part_parser, serialize
from fedring.rpc.contract import SMALL_BYTES
from fedring.rpc.errors import (
    BadRequest,
    BadUpdate,
    Damaged,
    DamagedOnTheWay,
    FedringError,
    Gone,
    NotAllowed,
    OtherUpdate,
    Overloaded,
    TooLarge,
    UnknownRound,
)
from fedring.rpc.streams import METER, TimedStream, write
from fedring.server.config import ServerConfig
from fedring.server.round.coordinator import Coordinator
from fedring.server.round.open_round import OpenRound
from fedring.server.round.sessions import Session
from fedring.server.state.blobs import FilePartial, MemoryPartial, StorageError
from fedring.server.state.rows import UpdateRow
from fedring.server.update.acceptance import Acceptor, Partial
from fedring.server.update.admission import Offered, check_header, check_payload, open_offer, packets_of
from fedring.v1 import federation_pb2 as pb

SERVICE = "fedring.v1.ClientUpdateService"
_AT_ONCE = 1 << 18  # values that are checked sooner than a thread is found for it


def add_update_service(service: "ClientUpdateService", server: aio.Server) -> None:
    """The server serves the service, with chunks that are read without a copy."""
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
    """PushUpdate and PushSmallUpdates, and what makes them safe to repeat."""

    def __init__(self, coordinator: Coordinator, acceptor: Acceptor, config: ServerConfig) -> None:
        self._coordinator, self._acceptor, self._config = coordinator, acceptor, config
        self._slots = asyncio.Semaphore(config.max_transfers)
        self._uploads: dict[str, asyncio.Task[Any]] = {}

    async def PushUpdate(
        self, request_iterator: AsyncIterator[pb.ClientUpdate | ReceivedChunk], context: Any
    ) -> AsyncIterator[pb.UpdateReply]:
        session = self._coordinator.sessions.of(context)
        with self._counted(session, 0) as count:
            messages = TimedStream(request_iterator, self._config.no_progress_seconds)
            async with aclosing(self._push(session, messages)) as replies:
                async for reply in replies:
                    count()  # before anybody knows that the update is here: its round may be over soon
                    yield reply

    async def PushSmallUpdates(self, request_iterator: AsyncIterator[pb.SmallUpdate], context: Any) -> None:
        session = self._coordinator.sessions.of(context)
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
        """The next update is answered; False if there is none.

        Not by the iterator, which would hold each update until the next one comes.
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
                accepted = self._accepted(already=await self._push_small(session, require_message(request)))
            await write(context, accepted, self._config.no_progress_seconds)
        return True

    @contextmanager
    def _counted(self, session: Session, counted: int) -> Iterator[Callable[[], None]]:
        """Inside, the call's bytes but for the first `counted`, and its seconds, are the client's in this round."""
        traffic, meter = self._coordinator.traffic(session.client_id), METER.get()
        began = time.monotonic()

        def count() -> None:
            nonlocal began, counted
            now, received = time.monotonic(), meter.received
            traffic.upload_bytes += received - counted
            traffic.upload_seconds += now - began
            began, counted = now, received

        try:
            yield count
        except (CodecError, FedringError, asyncio.CancelledError) as error:
            self._coordinator.metrics.refused(error)
            raise
        finally:
            count()

    def _accepted(self, *, already: bool) -> pb.Accepted:
        if already:
            self._coordinator.metrics.repeated()
        return pb.Accepted(already=already)

    async def _push(
        self, session: Session, messages: AsyncIterator[pb.ClientUpdate | ReceivedChunk]
    ) -> AsyncGenerator[pb.UpdateReply, None]:
        first = await anext(messages, None)
        if not isinstance(first, pb.ClientUpdate) or not first.HasField("offer"):
            raise BadRequest("the first message must be an offer")
        offered = open_offer(first.offer)
        header = offered.header
        open_ = await self._check(session, offered)
        if open_ is None:
            yield pb.UpdateReply(accepted=self._accepted(already=True))
            return
        async with self._slots, self._only_one(session.client_id):
            try:
                with ExitStack() as undo:
                    partial = await self._open(header, undo)
                    resumed = partial.size
                    yield pb.UpdateReply(resume_offset=resumed)
                    await self._receive(messages, partial, header)
                    self._check_digest(partial, offered, resumed)
                    row = await self._admit(partial, offered, self._coordinator.models.schema_of(open_.base))
                    undo.pop_all()  # the acceptor takes the partial over
                already = await self._acceptor.accept(partial, row)
            except UnknownRound:
                already = await self._accepted_before(offered)  # by the client's attempt before this one
                if not already:
                    raise
        yield pb.UpdateReply(accepted=self._accepted(already=already))

    async def _push_small(self, session: Session, request: pb.SmallUpdate) -> bool:
        """Whether the update counted already, once it counts."""
        offered = open_offer(request.offer)
        header = offered.header
        open_ = await self._check(session, offered)
        if open_ is None:
            return True
        if not len(request.payload) == header.total_bytes <= SMALL_BYTES:
            text = f"{len(request.payload)} bytes, not the declared {header.total_bytes}, or more than {SMALL_BYTES}"
            raise BadRequest(text, reason="bad_chunk")
        async with self._only_one(session.client_id):
            partial = MemoryPartial(request.payload)
            self._check_digest(partial, offered, 0)
            try:
                row = await self._admit(partial, offered, self._coordinator.models.schema_of(open_.base))
                return await self._acceptor.accept(partial, row)
            except UnknownRound:
                if await self._accepted_before(offered):  # by the client's attempt before this one
                    return True
                raise

    async def _accepted_before(self, offered: Offered) -> bool:
        """Whether this very update counts already; OtherUpdate if another one does."""
        header, open_, facts = offered.header, self._coordinator.open, self._coordinator.facts
        if header.run_id != facts.store.run_id or header.round >= 2**63:
            return False
        if open_ is not None and header.round == open_.row.round:
            known = open_.accepted[header.client_id].name if header.client_id in open_.accepted else ""
        else:
            known = await facts.db(facts.store.accepted_name, header.round, header.client_id)
        if known and known != offered.name:
            raise OtherUpdate(f"another update of {header.client_id} was accepted for round {header.round}")
        return bool(known)

    async def _check(self, session: Session, offered: Offered) -> OpenRound | None:
        """The open round that the header fits, None if its update counts already; refused before any byte is used."""
        header = offered.header
        if header.client_id != session.client_id:
            raise NotAllowed(f"{session.client_id} cannot speak for another client", reason="wrong_client")
        if await self._accepted_before(offered):
            return None
        open_ = self._require_open(header)
        if header.base_digest != open_.base.digest:
            text = f"round {header.round} starts from another model than {header.base_digest[:80]!r}"
            raise BadUpdate(text, reason="wrong_model")
        if header.total_bytes > open_.command.max_update_bytes:
            raise TooLarge(f"{header.total_bytes} bytes; the limit is {open_.command.max_update_bytes}")
        check_header(header, self._coordinator.models.schema_of(open_.base))
        return open_

    def _require_open(self, header: pb.UpdateHeader) -> OpenRound:
        return self._coordinator.deliverable(header.run_id, header.round, header.client_id)

    @asynccontextmanager
    async def _only_one(self, client_id: str) -> AsyncIterator[None]:
        """Inside, no other upload of the client runs: an older one, whose stream is dead, has been ended."""
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

    async def _open(self, header: pb.UpdateHeader, undo: ExitStack) -> Partial:
        """Where the payload goes, until `undo`: a small one waits in memory, another goes on in the file of before."""
        if header.total_bytes <= SMALL_BYTES:  # kept in its row, and handled here: a thread would cost more
            return MemoryPartial()
        facts = self._coordinator.facts
        # One file per client and round, whatever the digest: a client cannot fill the disk with beginnings.
        name = f"{header.round}-{name_of(header.client_id.encode())[-32:]}"

        def open_() -> Partial:  # all of it in the thread: the caller may be gone when the file is open
            partial = facts.blobs.open_partial(name)
            if partial.size > header.total_bytes:
                partial.close()
                partial = facts.blobs.open_partial(name, fresh=True)
            undo.callback(partial.close)
            return partial

        try:
            return await facts.work(open_)
        except StorageError as error:
            raise Overloaded(str(error), reason=error.reason) from error

    def _abort(self, partial: Partial) -> None:
        if isinstance(partial, FilePartial):
            self._coordinator.facts.blobs.abort(partial)

    async def _receive(
        self, messages: AsyncIterator[pb.ClientUpdate | ReceivedChunk], partial: Partial, header: pb.UpdateHeader
    ) -> None:
        """All bytes of the payload are in `partial`."""
        while partial.size < header.total_bytes:
            message = await anext(messages, None)
            if message is None:
                raise BadRequest(
                    f"the stream ended at {partial.size} of {header.total_bytes} bytes", reason="truncated"
                )
            self._require_open(header)  # an upload does not outlive its round
            chunk = message if isinstance(message, ReceivedChunk) else message.chunk
            if not 0 < len(chunk.data) <= CHUNK_BYTES or chunk.offset != partial.size:
                raise BadRequest(f"expected 1 to {CHUNK_BYTES} bytes at {partial.size}", reason="bad_chunk")
            if partial.size + len(chunk.data) > header.total_bytes:
                self._abort(partial)
                raise TooLarge(f"more than the declared {header.total_bytes} bytes")
            await self._write(partial, chunk.data)

    async def _write(self, partial: Partial, data: bytes | memoryview) -> None:
        try:
            if isinstance(partial, MemoryPartial):
                partial.write(data)
            else:
                await self._coordinator.facts.work(partial.write, data)
        except StorageError as error:
            raise Overloaded(str(error), reason=error.reason) from error

    def _check_digest(self, partial: Partial, offered: Offered, resumed: int) -> None:
        if partial.digest == offered.digest:
            return
        self._abort(partial)
        if resumed:  # what lay here before may have been damaged by a power loss, or been another's
            raise Damaged("the part that was here is not of this payload: send it from the start")
        raise DamagedOnTheWay("the payload is not what its digest says: send it again")

    async def _admit(self, partial: Partial, offered: Offered, schema: Schema) -> UpdateRow:
        """The row of an update of which every byte is good."""
        header = offered.header
        packets = packets_of(header)
        small = isinstance(partial, MemoryPartial)
        try:
            # A few bytes can stand for many values: how long the check takes, the model says.
            if small and len(packets) * (schema.num_parameters + schema.num_buffers) <= _AT_ONCE:
                admitted = check_payload(partial.read, packets, schema)
            else:
                admitted = await self._coordinator.facts.work(check_payload, partial.read, packets, schema)
        except CodecError as error:
            self._abort(partial)
            text = f"an update of {header.client_id} was refused: {error}"
            self._coordinator.journal.write("update_refused", text, client_id=header.client_id)
            raise
        return UpdateRow(
            round=header.round,
            client_id=header.client_id,
            digest=offered.digest,
            name=offered.name,
            packets=packets,
            num_samples=header.packets[-1].num_samples,
            total_bytes=header.total_bytes,
            train_seconds=header.train_seconds,
            norm=admitted.norm,
            accepted_at=time.time(),
            metrics=dict(header.metrics),
            blob="" if small else offered.digest,
            payload=partial.read(0, partial.size) if small else b"",
            epoch=self._coordinator.facts.store.epoch,
        )


async def _end(closed: asyncio.Event, at_work: asyncio.Lock) -> None:
    """Raise Gone once the session is closed, but not while somebody is at work; Watch tells why."""
    await closed.wait()
    async with at_work:
        raise Gone("the session was closed")
