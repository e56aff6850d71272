"""Fetching models: each version once, from where the last try broke off, as a step from the one before."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from grpc import StatusCode, aio

from fedring.client.errors import BadModel, RoundOver
from fedring.client.session.backoff import Backoff
from fedring.client.session.connection import Connection, is_doubtful, stray_cancellation
from fedring.client.transfer.download import Download, HeldModel
from fedring.codec import Schema
from fedring.rpc.chunks import ReceivedChunk
from fedring.rpc.errors import FedringError, Unavailable, reason_of, status_of
from fedring.rpc.streams import TimedStream
from fedring.v1 import federation_pb2 as pb

log = logging.getLogger(__name__)

_AGAIN = {
    StatusCode.UNAVAILABLE,
    StatusCode.DEADLINE_EXCEEDED,
    StatusCode.RESOURCE_EXHAUSTED,
    StatusCode.CANCELLED,
    StatusCode.UNKNOWN,
    StatusCode.INTERNAL,
}
_REJOIN = {StatusCode.UNAUTHENTICATED, StatusCode.ABORTED}
_AS_ASKED = {StatusCode.NOT_FOUND, StatusCode.INVALID_ARGUMENT, StatusCode.UNIMPLEMENTED}
"""How also a request is refused that was damaged on its way."""

_MOST_REFUSALS = 3
"""Of a download; the last is believed."""


class ModelFetcher:
    """Holds the newest model that was fetched."""

    def __init__(self, connection: Connection, tell: Callable[[float], None]) -> None:
        self._connection = connection
        self._tell = tell  # is told the share of a download that is here
        self._held: HeldModel | None = None

    def at_hand(self, command: pb.TrainCmd | pb.EvaluateCmd, schema: Schema) -> HeldModel | None:
        """The command's model, for one of `schema`, if it is held or came with the command; from any thread."""
        digest, held = command.model_digest, self._held
        if held and (held.digest, held.schema.hash) == (digest, schema.hash):
            return held
        if isinstance(command, pb.EvaluateCmd) or not command.HasField("model"):
            return None
        try:
            download = Download(digest, schema, None)
            download.begin(command.model.header)
            download.add(pb.Chunk(data=command.model.payload))
            self._held = download.finish()
            self._connection.metrics.download_bytes.inc(download.received)
        except BadModel as error:
            log.warning("model %d did not come whole with its command (%s); fetching it", command.model_version, error)
            return None
        return self._held

    async def fetch(self, digest: str, schema: Schema, ended: Callable[[], str]) -> HeldModel:
        """The model of that digest, for one of `schema`; RoundOver once `ended()` says why it is no longer wanted."""
        held = self._held
        if held and held.schema.hash != schema.hash:
            held = self._held = None
        try:
            self._held = await self._download(Download(digest, schema, held), ended)
        except BadModel as error:
            log.warning("model %s did not arrive whole (%s); fetching it again, in full", digest, error)
            self._held = await self._download(Download(digest, schema, None), ended)
        return self._held

    async def _download(self, download: Download, ended: Callable[[], str]) -> HeldModel:
        backoff, refusals = Backoff(), 0
        while not download.complete:
            session_id = self._connection.session.session_id
            try:
                with stray_cancellation():
                    await self._stream(download, ended)
                continue
            except (aio.AioRpcError, FedringError) as error:
                status = status_of(error)
                refusals += status in _AS_ASKED
                if status not in _AGAIN | _REJOIN | _AS_ASKED or refusals >= _MOST_REFUSALS:
                    raise RoundOver(ended() or reason_of(error), str(error)) from error
                if is_doubtful(error):
                    await self._connection.reconnect()
            if why := ended():
                raise RoundOver(why)
            with suppress(Unavailable), stray_cancellation():
                if status in _REJOIN:
                    await self._rejoin(session_id, ended)
                await asyncio.sleep(backoff.next())
        if download.is_small:
            return download.finish()
        return await asyncio.to_thread(download.finish)

    async def _stream(self, download: Download, ended: Callable[[], str]) -> None:
        """One call: afterwards the download is complete, or has more than it had."""
        session = self._connection.session
        call = self._connection.fetch_model(download.request, metadata=self._connection.metadata)
        try:
            async for part in TimedStream(aiter(call), session.no_progress_seconds):
                if isinstance(part, pb.ModelBlob) and part.HasField("header"):
                    download.begin(part.header)
                else:
                    chunk = part if isinstance(part, ReceivedChunk) else part.chunk
                    download.add(chunk)
                    self._connection.metrics.download_bytes.inc(len(chunk.data))
                    self._tell(download.share)
                if why := ended():
                    raise RoundOver(why)
        finally:
            call.cancel()
        if not download.complete:
            raise Unavailable("the stream ended before the model did")

    async def _rejoin(self, session_id: str, ended: Callable[[], str]) -> None:
        while not ended():
            try:
                async with asyncio.timeout(1):
                    return await self._connection.wait_for_new_session(session_id)
            except TimeoutError:
                continue
