"""Fetches each model once, resuming after losses.

If possible, it comes as a difference from the previous version.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar

from grpc import StatusCode, aio

from fedring.client.errors import RoundOver, WrongModel
from fedring.client.session.connection import Connection
from fedring.client.session.retry import RetryPolicy, Verdict
from fedring.client.session.tries import Tries
from fedring.codec import Schema
from fedring.rpc.chunks import ReceivedChunk
from fedring.rpc.errors import FedringError, Unavailable, reason_of
from fedring.rpc.streams import TimedStream
from fedring.train.tensors.download import BadModel, BlobDownload, Download, HeldModel, OtherSchema
from fedring.v1 import federation_pb2 as pb

log = logging.getLogger(__name__)

T = TypeVar("T")

POLICY = RetryPolicy(
    {
        # So the server also refuses a request that was damaged on its way.
        StatusCode.NOT_FOUND: Verdict.AGAIN,
        StatusCode.INVALID_ARGUMENT: Verdict.AGAIN,
        # The server's own copy of the model is damaged.
        StatusCode.DATA_LOSS: Verdict.DROP,
    }
)


class ModelFetcher:
    """Fetches models and holds the newest one.

    Args:
        connection: To the server.
        tell: Is called with the share of a download that was received, 0 to 1.
    """

    def __init__(self, connection: Connection, tell: Callable[[float], None]) -> None:
        self._connection = connection
        self._tell = tell
        self._held: HeldModel | None = None

    def at_hand(self, command: pb.TrainCmd | pb.EvaluateCmd, schema: Schema) -> HeldModel | None:
        """Return a command's model if no download is needed, else None.

        It may be held already, or come with the command. Any thread may call this, while nothing is being fetched.

        Args:
            command: The command, which names the model and may carry it.
            schema: The schema that the model must have.

        Raises:
            WrongModel: If the model that came with the command has another schema.
        """
        digest, held = command.model_digest, self._held
        if held and (held.digest, held.schema.hash) == (digest, schema.hash):
            return held
        if isinstance(command, pb.EvaluateCmd) or not command.HasField("model"):
            return None
        try:
            download = Download(digest, schema, None)
            _begin(download, command.model.header)
            download.add(pb.Chunk(data=command.model.payload))
            self._held = download.finish()
            self._connection.metrics.download_bytes.inc(download.received)
        except BadModel as error:
            log.warning(
                "model %d, which came with its command, is not valid (%s); fetching it", command.model_version, error
            )
            return None
        return self._held

    async def fetch(self, digest: str, schema: Schema, ended: Callable[[], str]) -> HeldModel:
        """Fetch a model from the server.

        Args:
            digest: The name of the model.
            schema: The schema that it must have.
            ended: Returns why the model is no longer wanted; empty while it is.

        Raises:
            RoundOver: If the model is no longer wanted, or the server refuses to send it.
            BadModel: If what the server sent was invalid twice.
            WrongModel: If the model has another schema.
        """
        held = self._held
        if held and held.schema.hash != schema.hash:
            held = self._held = None
        bases = [None, held]  # The second try is in full.
        what = f"model {digest}"
        self._held = await self.download(what, lambda: Download(digest, schema, bases.pop()), ended)
        return self._held

    async def download(self, what: str, make: Callable[[], BlobDownload[T]], ended: Callable[[], str]) -> T:
        """Download something of the server's models; it is not held here.

        Args:
            what: What it is, for the log.
            make: Makes what receives it, again if the first one receives something that is not valid.
            ended: Returns why it is no longer wanted; empty while it is.

        Returns:
            What the receiver makes of it.

        Raises:
            RoundOver: If it is no longer wanted, or the server refuses to send it.
            BadModel: If what the server sent was invalid twice.
            WrongModel: If the model has another schema.
        """
        try:
            return await self._receive(make(), ended)
        except BadModel as error:
            log.warning("%s is not valid as received (%s); fetching it again, in full", what, error)
        return await self._receive(make(), ended)

    async def _receive(self, download: BlobDownload[T], ended: Callable[[], str]) -> T:
        """Make calls until the download is complete, and finish it."""
        tries = Tries(self._connection, POLICY)

        def look() -> None:
            if why := ended():
                raise RoundOver(why)

        while not download.complete:
            try:
                with tries.one():
                    await self._stream(download, look)
            except (aio.AioRpcError, FedringError) as error:
                if tries.judge(error) is Verdict.DROP:
                    raise RoundOver(ended() or reason_of(error), str(error)) from error
                await tries.wait(look=look)
        return download.finish() if download.is_small else await asyncio.to_thread(download.finish)

    async def _stream(self, download: BlobDownload[T], look: Callable[[], None]) -> None:
        """Make one call, and add its bytes to the download."""
        session = self._connection.session
        call = self._connection.fetch_model(download.request, metadata=self._connection.metadata)
        try:
            async for part in TimedStream(aiter(call), session.no_progress_seconds):
                if isinstance(part, pb.ModelBlob) and part.HasField("header"):
                    _begin(download, part.header)
                else:
                    chunk = part if isinstance(part, ReceivedChunk) else part.chunk
                    download.add(chunk)
                    self._connection.metrics.download_bytes.inc(len(chunk.data))
                    self._tell(download.share)
                look()
        finally:
            call.cancel()
        if not download.complete:
            raise Unavailable("the stream ended before the model did")


def _begin(download: BlobDownload[T], header: pb.ModelHeader) -> None:
    try:
        download.begin(header)
    except OtherSchema as error:
        raise WrongModel(str(error)) from error
