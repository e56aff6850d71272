"""ModelBlobService: models, streamed from disk."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import ExitStack, aclosing, contextmanager
from typing import Any

from fedring.codec.digest import name_of
from fedring.rpc.chunks import CHUNK_BYTES, chunk_message, chunks
from fedring.rpc.errors import BadRequest, Unavailable, UnknownModel
from fedring.rpc.streams import METER, write
from fedring.server.config import ServerConfig
from fedring.server.model.downloads import Download, Downloads
from fedring.server.running.client_reports import ClientReports
from fedring.server.sessions.sessions import Sessions
from fedring.server.state.facts import Facts
from fedring.server.state.failures import DamagedModel
from fedring.v1 import federation_pb2 as pb
from fedring.v1 import federation_pb2_grpc as rpc

_KEPT = 32
"""Chunks that are kept for calls that send the same payload, and are a little behind."""


class _Payload:
    """A payload that several calls send at the same time.

    The first call that comes to a chunk reads and digests it, and those that come soon after send the same bytes. A
    call that comes too late reads the chunk by itself, and compares it with a digest of what the others have sent.

    Args:
        download: reads the chunks, in order.
        files: closed when the last call has left.

    Attributes:
        places: how far each call has come, in bytes.
        most: chunks to keep.
    """

    def __init__(self, download: Download, files: ExitStack) -> None:
        self.download, self.files, self.most = download, files, _KEPT
        self.places: dict[object, int] = {}
        self._made = 0  # bytes of the payload that are in messages by now
        self._kept: dict[int, bytes] = {}  # the newest messages, by offset
        self._digests: dict[int, str] = {}  # of messages that are kept no more, and that a call has still to send

    @property
    def begins(self) -> bool:
        """Whether a further call would still find the first chunk."""
        return not self._made or 0 in self._kept

    def message(self, call: object) -> bytes | None:
        """Return the message of a call's next chunk, or None.

        None if the other calls are so far ahead that it is kept no more.

        Raises:
            DamagedModel, Unavailable, StorageFailed: as `Download.read`.
        """
        offset = self.places[call]
        if offset == self._made:
            self._kept[offset] = _message(self.download, offset)
            self._made += CHUNK_BYTES
            self._shorten()
        return self._kept.get(offset)

    def is_same(self, call: object, message: bytes) -> bool:
        """Return whether a late call has read the same as others."""
        return self._digests.get(self.places[call]) == name_of(message)

    def keep_one(self) -> None:
        """Keep only the newest message from now on."""
        self.most = 1
        self._shorten()

    def _shorten(self) -> None:
        """Forget messages that no call needs, and the oldest of too many."""
        slowest = min(self.places.values())
        while len(self._kept) > 1 and (len(self._kept) > self.most or not self.begins):
            oldest = next(iter(self._kept))
            if oldest >= slowest:
                if len(self._kept) <= self.most:
                    return
                self._digests[oldest] = name_of(self._kept[oldest])
            del self._kept[oldest]


class _SharedPayloads:
    """Lets calls that begin together send one payload.

    One payload at a time keeps chunks for others, so that all of them take at most _KEPT chunks of memory.
    """

    def __init__(self) -> None:
        self._open: _Payload | None = None  # the one that can be joined

    @contextmanager
    def join(self, call: object, files: ExitStack, download: Download) -> Iterator[_Payload]:
        """Provide the payload of a download for a call.

        The call sends it from its start.

        Args:
            call: any object that no other call has.
            files: closed as soon as no call needs the download.
            download: what the call would read by itself.
        """
        payload = self._open
        if payload is not None and payload.begins and payload.download.header == download.header:
            files.close()
        else:
            payload = self._replace(_Payload(download, files))
        payload.places[call] = 0
        try:
            yield payload
        finally:
            del payload.places[call]
            if not payload.places:
                payload.files.close()
                self._open = None if self._open is payload else self._open

    def _replace(self, payload: _Payload) -> _Payload:
        """Let others join the new payload, unless several share the same one.

        Calls that still send another one are slow, and may go on alone.
        """
        present = self._open
        if present is not None:
            if len(present.places) > 1 and present.download.header == payload.download.header:
                payload.most = 1
                return payload
            present.keep_one()
        self._open = payload
        return payload


class ModelStreams:
    """Models as the messages of a stream.

    Args:
        downloads: opens models.
        facts: reads them in threads.
        damaged: is told of a model that turns out to be damaged.
    """

    def __init__(self, downloads: Downloads, facts: Facts, damaged: Callable[[DamagedModel], Awaitable[None]]) -> None:
        self._downloads, self._facts, self._damaged = downloads, facts, damaged
        self._shared = _SharedPayloads()

    async def messages(self, request: pb.FetchModelRequest) -> AsyncGenerator[Any, None]:
        """Yield the header and the chunks, as bytes, that answer `request`.

        The last chunk comes once all are proven.

        Raises:
            UnknownModel: if there is no such version, or not any more.
            BadRequest: "bad_offset", if the request names a place that the payload does not have.
            DamagedModel: if it is damaged; a round that starts from it has been ended.
        """
        try:
            with ExitStack() as files:
                download = await self._opened(request, files)
                header, total = download.header, download.header.total_bytes
                start = _start_of(request, header)
                yield pb.ModelBlob(header=header)
                if not start:
                    call = object()
                    payload = files.enter_context(self._shared.join(call, files.pop_all(), download))
                    async with aclosing(self._together(request, call, payload)) as messages:
                        async for message in messages:
                            yield message
                    return
                for offset, message in chunks(download.read, start=start, total=total):
                    if offset + CHUNK_BYTES >= total:
                        await self._facts.work(download.check)  # reads all that came before
                    yield message
        except DamagedModel as error:
            row = await self._facts.db(self._facts.store.models.get, error.version)
            if row is None or error.digest not in row.files:  # it is too old by now, and its file is gone for that
                text = f"model {error.version} is not kept any more: `flctl models list` shows those that are"
                raise UnknownModel(text) from error
            await self._damaged(error)
            raise

    async def _opened(self, request: pb.FetchModelRequest, files: ExitStack) -> Download:
        def opened() -> Download:  # a call that is cancelled meanwhile closes it, too
            return files.enter_context(self._downloads.open(request))

        # Ranges are digested when they are opened, and objects are fetched, which takes long.
        slow = request.ranges or self._facts.lead is not None
        return await self._facts.work(opened) if slow else opened()

    async def _together(
        self, request: pb.FetchModelRequest, call: object, payload: _Payload
    ) -> AsyncGenerator[bytes, None]:
        """Yield all chunks of a payload, which other calls may send, too."""
        header = payload.download.header
        with ExitStack() as files:
            own: Download | None = None
            while (offset := payload.places[call]) < header.total_bytes:
                message = payload.message(call)
                if message is None:  # the others are too far ahead
                    if own is None:
                        own = await self._opened(request, files)
                    message = _message(own, offset) if own.header == header else b""
                    if not payload.is_same(call, message):
                        await self._facts.work(own.check)  # raises the error of a damaged model
                        raise Unavailable(f"model {header.version} has changed while it was sent: ask again")
                if offset + CHUNK_BYTES >= header.total_bytes:
                    payload.download.check()  # quick: all of it was digested on the way
                yield message
                payload.places[call] = offset + CHUNK_BYTES


class ModelBlobService(rpc.ModelBlobServiceServicer):
    """Streams models from the disk."""

    def __init__(self, streams: ModelStreams, reports: ClientReports, sessions: Sessions, config: ServerConfig) -> None:
        self._streams, self._reports, self._sessions, self._config = streams, reports, sessions, config
        self._slots = asyncio.Semaphore(config.max_transfers)

    async def FetchModel(  # type: ignore[override]  # grpc takes a coroutine that writes to the context, too
        self, request: pb.FetchModelRequest, context: Any
    ) -> None:
        session = self._sessions.of(context)
        request.exact = False  # clients train from the model that has the digest
        traffic, meter = self._reports.traffic(session.client_id), METER.get()
        began = time.monotonic()
        digest = ""
        try:
            with self._reports.transfer(session):
                async with self._slots, aclosing(self._streams.messages(request)) as messages:
                    async for message in messages:
                        await write(context, message, self._config.no_progress_seconds)
                        if isinstance(message, pb.ModelBlob):
                            digest = "" if request.ranges else message.header.model_digest
            session.holds = digest
        finally:
            traffic.download_bytes += meter.sent
            traffic.download_seconds += time.monotonic() - began


def _message(download: Download, offset: int) -> bytes:
    """Return the message of the chunk at an offset."""
    return chunk_message(offset, download.read(offset, min(CHUNK_BYTES, download.header.total_bytes - offset)))


def _start_of(request: pb.FetchModelRequest, header: pb.ModelHeader) -> int:
    """Return the offset at which the payload continues.

    Raises BadRequest if there is no such place.
    """
    if request.offset and not request.payload_name:
        raise BadRequest(
            f"offset {request.offset} without payload_name belongs to no payload: begin at 0", reason="bad_offset"
        )
    if request.payload_name != header.payload_name:
        return 0  # the payload has changed since: it is sent from the start
    if request.offset > header.total_bytes:
        raise BadRequest(
            f"offset {request.offset} is beyond the payload's {header.total_bytes} bytes: begin at 0",
            reason="bad_offset",
        )
    return request.offset
