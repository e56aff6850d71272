"""ModelBlobService: models, streamed from disk."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from fedring.rpc.chunks import CHUNK_BYTES, chunks
from fedring.rpc.errors import BadRequest
from fedring.rpc.streams import METER, write
from fedring.server.config import ServerConfig
from fedring.server.model.downloads import Downloads
from fedring.server.round.client_reports import ClientReports
from fedring.server.sessions.sessions import Sessions
from fedring.server.state.facts import Facts
from fedring.server.state.failures import DamagedModel
from fedring.v1 import federation_pb2 as pb
from fedring.v1 import federation_pb2_grpc as rpc


class ModelStreams:
    """Models as the messages of a stream.

    Args:
        downloads: opens models.
        facts: reads them in threads.
        damaged: is told of a model that turns out to be damaged.
    """

    def __init__(self, downloads: Downloads, facts: Facts, damaged: Callable[[DamagedModel], Awaitable[None]]) -> None:
        self._downloads, self._facts, self._damaged = downloads, facts, damaged

    async def messages(self, request: pb.FetchModelRequest) -> AsyncGenerator[Any, None]:
        """Yield the header and the chunks, as bytes, that answer `request`.

        The last chunk comes once all are proven.

        Raises:
            UnknownModel: if there is no such version.
            BadRequest: "bad_offset", if the request names a place that the payload does not have.
            DamagedModel: if it is damaged; a round that starts from it has been ended.
        """
        try:
            # Ranges are digested when they are opened, which takes long.
            open_ = self._downloads.open
            opened = await self._facts.work(open_, request) if request.ranges else open_(request)
            with opened as download:
                start, total = _start_of(request, download.header), download.header.total_bytes
                yield pb.ModelBlob(header=download.header)
                for offset, message in chunks(download.read, start=start, total=total):
                    if offset + CHUNK_BYTES >= total:
                        # What was read from the start of the payload is digested already; reading the rest takes long.
                        if start:
                            await self._facts.work(download.check)
                        else:
                            download.check()
                    yield message
        except DamagedModel as error:
            await self._damaged(error)
            raise


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
