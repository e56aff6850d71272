"""Effects of uploads (`fedring.server.update.upload`), performed."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from typing import Any

from fedring.codec.errors import CodecError
from fedring.codec.schema import Schema
from fedring.rpc.chunks import ReceivedChunk
from fedring.rpc.errors import FedringError, Overloaded, UnknownRound
from fedring.server.aggregation.terms import OpaqueForm, Terms
from fedring.server.aggregation.versions import ModelVersions
from fedring.server.running.rounds import Rounds
from fedring.server.state.blob_interfaces import Partial
from fedring.server.state.blobs import MemoryPartial
from fedring.server.state.facts import Facts
from fedring.server.state.failures import StorageError
from fedring.server.state.journal import Journal
from fedring.server.state.rows import PacketSpec
from fedring.server.update.acceptance import Acceptor
from fedring.server.update.admission import (
    Admission,
    accepted_before,
    check_payload,
    check_sender,
    check_whole,
    open_offer,
    row_of,
)
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
    Open,
    Opened,
    Read,
    Send,
    TakeDigest,
    TooLate,
    Upload,
    Write,
    Written,
)
from fedring.v1 import federation_pb2 as pb

_PAUSES = (Send, Done)  # effects that are not performed, but answered
_AT_ONCE = 1 << 18  # so many values are checked sooner than a thread could be found for it
_TOGETHER = 4
"""Chunks of an upload that are written together: to hand one to a thread costs a tenth of receiving it."""


class UploadCalls:
    """Performs the effects of all uploads.

    Args:
        rounds: take updates.
        acceptor: makes them durable.
        versions: of models, to which updates must fit.
        facts: keep the payloads.
        journal: is told of damaged ones.
        most: uploads in chunks at once.
    """

    def __init__(
        self, rounds: Rounds, acceptor: Acceptor, versions: ModelVersions, facts: Facts, journal: Journal, most: int
    ) -> None:
        self._rounds, self._acceptor, self._versions = rounds, acceptor, versions
        self._facts, self._journal = facts, journal
        self._slots = asyncio.Semaphore(most)
        self._uploads: dict[str, asyncio.Task[Any]] = {}

    def call(self, client: str, messages: AsyncIterator[pb.ClientUpdate | ReceivedChunk]) -> "UploadCall":
        """Return a call of a client; its stack must be entered."""
        return UploadCall(client, Upload(client, self._facts.store.epoch), messages)

    async def advance(self, call: "UploadCall", event: Event) -> Effect:
        """Perform the upload's effects until one must be sent, or none remains.

        Returns the effect to send, or the end.
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

    async def take(self, client: str, offer: pb.UpdateOffer, payload: bytes) -> Done:
        """Accept an update that came in one message.

        It passes the checks of `Upload` in a straight line, because there is nothing to wait for between them, and such
        updates are many.

        Args:
            client: that makes the call.
            offer: of the update.
            payload: all of it.

        Returns:
            The end of the upload.

        Raises:
            FedringError, CodecError: if the update is refused.
        """
        if client in self._uploads:
            async with self._only_one(client):
                return await self._take(client, offer, payload)
        self._uploads[client] = _this_task()
        try:
            return await self._take(client, offer, payload)
        finally:
            del self._uploads[client]

    async def _take(self, client: str, offer: pb.UpdateOffer, payload: bytes) -> Done:
        decoded = open_offer(offer)
        header = decoded.header
        check_sender(header, client)
        if accepted_before(decoded, await self._accepted_name(header.run_id, header.round, client)):
            return Done(already=True)
        terms = self._terms(header.run_id, header.round, client)
        packets, partial = check_whole(decoded, payload, terms), MemoryPartial(payload)
        norm = await self._check(client, partial, packets, terms.schema, exact=terms.bare, opaque=terms.opaque)
        found = Admission(packets, norm, time.time())
        row = row_of(decoded, terms, found, payload, epoch=self._facts.store.epoch)
        try:
            return Done(*await self._acceptor.accept(partial, row, decoded.audit_head))
        except UnknownRound:
            # An attempt of the same client before this one may have ended its round.
            if accepted_before(decoded, await self._accepted_name(header.run_id, header.round, client)):
                return Done(already=True)
            raise

    async def _perform(self, call: "UploadCall", effect: Effect) -> Event:
        """Perform an effect of the upload, and return the resulting event."""
        client = call.client
        try:
            match effect:
                case LookUp(run_id, number):
                    return Known(await self._accepted_name(run_id, number, client))
                case AskRound(run_id, number):
                    return self._terms(run_id, number, client)
                case Open():
                    return Opened(await self._open(call, effect))
                case Read():
                    return await self._read(call, effect)
                case Write(data):
                    await self._write(call, data)
                    return Written()
                case TakeDigest():
                    await self._write_waiting(call)
                    return Digested(call.partial.digest)
                case Admit():
                    return await self._admit(call, effect)
                case Accept(row, client_head):
                    call.undo.pop_all()  # the acceptor takes the partial over
                    return Accepted(*await self._acceptor.accept(call.partial, row, client_head))
        except UnknownRound as error:
            return TooLate(error)
        raise TypeError(f"{effect} is no effect of an upload")

    def _terms(self, run_id: str, number: int, client: str) -> Terms:
        open_ = self._rounds.deliverable(run_id, number, client)
        return open_.terms(client, self._versions.schema_of(open_.base))

    async def _accepted_name(self, run_id: str, number: int, client: str) -> str:
        """Return the name of a client's accepted update in the round.

        Empty if there is none.
        """
        facts = self._facts
        if run_id != facts.store.run_id or number >= 2**63:
            return ""
        if (open_ := self._rounds.get(number)) is not None:
            found = open_.accepted.get(client)
            return found.name if found is not None and found.round == number else ""
        return await facts.db(facts.store.updates.accepted_name, number, client)

    async def _open(self, call: "UploadCall", effect: Open) -> int:
        """Open a place for the payload, and return its present size.

        The size is in bytes. The place is open until the call's stack is closed.
        """
        if not call.opened:
            call.opened = True
            await call.stack.enter_async_context(self._slots)
            await call.stack.enter_async_context(self._only_one(call.client))
            call.stack.enter_context(call.undo)
            call.stack.callback(self._keep_waiting, call)
        if not effect.name:  # a small payload is handled in memory, in this thread: another would cost more
            call.partial = MemoryPartial()
            return 0

        def open_() -> None:  # all of it in the thread: the call may have ended when the file is open
            call.undo.close()
            call.partial = partial = self._facts.blobs.open_partial(effect.name, fresh=effect.fresh)
            call.undo.callback(partial.close)

        try:
            await self._facts.work(open_)
        except StorageError as error:
            raise Overloaded(str(error), reason=error.reason) from error
        return call.partial.size

    async def _read(self, call: "UploadCall", effect: Read) -> Event:
        message = call.newest = await anext(call.messages, None)
        if message is None:
            return Ended()
        self._rounds.deliverable(effect.run_id, effect.round, call.client)  # an upload does not outlive its round
        chunk = message if isinstance(message, ReceivedChunk) else message.chunk
        return Chunk(chunk.offset, chunk.data)

    async def _write(self, call: "UploadCall", data: bytes | memoryview) -> None:
        if isinstance(call.partial, MemoryPartial):
            call.partial.write(data)
            return
        call.waiting.append(data)
        if len(call.waiting) == _TOGETHER:
            await self._write_waiting(call)

    async def _write_waiting(self, call: "UploadCall") -> None:
        """Write the chunks that wait to be written."""
        if not call.waiting:
            return
        waiting, call.waiting = call.waiting, []

        def write(partial: Partial) -> None:
            for data in waiting:
                partial.write(data)

        try:
            await self._facts.work(write, call.partial)
        except StorageError as error:
            raise Overloaded(str(error), reason=error.reason) from error

    def _keep_waiting(self, call: "UploadCall") -> None:
        """Write the chunks of an upload that has ended early.

        Its client goes on from there. They are few, and are written at once: when a server ends, its threads end before
        its calls do.
        """
        with suppress(StorageError):
            for data in call.waiting:
                call.partial.write(data)

    async def _admit(self, call: "UploadCall", effect: Admit) -> Admitted:
        partial = call.partial
        norm = await self._check(
            call.client, partial, effect.packets, effect.schema, exact=effect.exact, opaque=effect.opaque
        )
        return Admitted(norm, time.time(), partial.payload if isinstance(partial, MemoryPartial) else b"")

    async def _check(
        self,
        client: str,
        partial: Partial,
        packets: Sequence[PacketSpec],
        schema: Schema,
        *,
        exact: bool,
        opaque: OpaqueForm | None,
    ) -> float:
        """Check every byte of a payload, and return the norm."""
        small = isinstance(partial, MemoryPartial)
        try:
            # How long the check takes depends on the model: a few bytes can stand for many values.
            if small and len(packets) * (schema.num_parameters + schema.num_buffers) <= _AT_ONCE:
                return check_payload(partial.read, packets, schema, exact, opaque)
            return await self._facts.work(check_payload, partial.read, packets, schema, exact, opaque)
        except CodecError as error:
            text = f"an update of {client} was refused: {error}"
            self._journal.write("update_refused", text, client_id=client)
            raise

    def _discard(self, call: "UploadCall") -> None:
        call.waiting.clear()
        if not isinstance(call.partial, MemoryPartial):
            self._facts.blobs.abort(call.partial)

    @asynccontextmanager
    async def _only_one(self, client_id: str) -> AsyncIterator[None]:
        """Let no other upload of the client run inside.

        An older one is ended: its stream is dead.
        """
        if (older := self._uploads.get(client_id)) is not None:
            older.cancel()
            await asyncio.wait([older])
        if client_id in self._uploads:
            raise Overloaded(f"an older upload of {client_id} has not ended yet")
        self._uploads[client_id] = _this_task()
        try:
            yield
        finally:
            del self._uploads[client_id]


def _this_task() -> asyncio.Task[Any]:
    if (task := asyncio.current_task()) is None:
        raise RuntimeError("an upload runs in no task")
    return task


class UploadCall:
    """The state of one call that uploads."""

    def __init__(self, client: str, upload: Upload, messages: AsyncIterator[pb.ClientUpdate | ReceivedChunk]) -> None:
        self.client, self.upload, self.messages = client, upload, messages
        self.partial: Partial = MemoryPartial()
        self.stack = AsyncExitStack()  # gives back what the call holds while its upload is open
        self.undo = ExitStack()  # closes the partial
        self.opened = False
        self.waiting: list[bytes | memoryview] = []  # chunks that have not been written yet
        # The newest message is kept until the next one is here. If its memory were free meanwhile, the C library would
        # give it back to the system, and ask for it again: 7 % of the server's CPU in a round of large updates.
        self.newest: pb.ClientUpdate | ReceivedChunk | None = None
