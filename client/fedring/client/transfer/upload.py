"""Pushing one spooled update until the server has it, or will not have it."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

from grpc import StatusCode, aio

from fedring.client.errors import RoundOver, UpdateRefused
from fedring.client.session.backoff import Backoff
from fedring.client.session.connection import Connection, is_doubtful, stray_cancellation
from fedring.client.transfer.spool import Spooled
from fedring.rpc.chunks import CHUNK_BYTES, chunks
from fedring.rpc.contract import SMALL_BYTES
from fedring.rpc.errors import FedringError, Stalled, TooLarge, Unavailable, UnknownRound, reason_of, status_of
from fedring.v1 import federation_pb2 as pb

log = logging.getLogger(__name__)

T = TypeVar("T")

_FINAL = {
    StatusCode.INVALID_ARGUMENT,
    StatusCode.NOT_FOUND,
    StatusCode.ALREADY_EXISTS,
    StatusCode.PERMISSION_DENIED,
    StatusCode.OUT_OF_RANGE,
}


MOST_TRIES = 3
"""Of one update whose bytes are damaged on their way."""

_ON_THE_WAY = {"digest_mismatch", "damaged", "bad_chunk", "bad_request", "truncated", "unknown_method", "unimplemented"}
"""What only bytes are refused with that are not those that were sent, in an upload or in the beginning of one."""


class Undecided(RoundOver):
    """The deadline passed before the server said whether it has the update."""


class GivenUp(RoundOver):
    """The round ended here before the server had all of the update; it has not said that it will never take it."""


class DamagedSpool(UpdateRefused):
    """The server does not have the update, and it is not on this side any more either."""

    def __init__(self) -> None:
        super().__init__("damaged_spool", "the update was damaged while it waited to be sent")


class Upload:
    """One update on its way; `ended` says why it is no longer wanted, empty while it is."""

    def __init__(
        self, connection: Connection, spooled: Spooled, ended: Callable[[], str], tell: Callable[[float], None]
    ) -> None:
        self._connection = connection
        self._spooled = spooled
        self._ended = ended
        self._tell = tell  # is told the share of the payload that is on its way

    async def run(self, deadline: float) -> None:
        """Return when the server has accepted; RoundOver, UpdateRefused or Undecided if it has not.

        A round that ends stops the sending, but not the asking: the update may have been accepted by a call whose
        answer was lost. `deadline` is in monotonic seconds.
        """
        backoff, tries = Backoff(), 0
        small = self._spooled.header.total_bytes <= SMALL_BYTES and not self._ended()
        while True:
            session_id = self._connection.session.session_id
            try:
                with stray_cancellation():
                    return await (self._push_small() if small else self._push())
            except (aio.AioRpcError, FedringError) as error:
                rejoin = self._judge(error)
                damaged = reason_of(error) in _ON_THE_WAY
                if damaged:
                    tries += 1
                    await self._check(error, tries)
                if is_doubtful(error) or (damaged and tries == MOST_TRIES - 1):
                    await self._connection.reconnect()
            small = False  # from now on the server is asked first: it may have the update already
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    if rejoin:
                        await self._connection.wait_for_new_session(session_id)
                    await asyncio.sleep(backoff.next())
            except TimeoutError as error:
                raise Undecided("deadline", "the server could not be asked any more") from error

    def _judge(self, error: aio.AioRpcError | FedringError) -> bool:
        """Raise if `error` is the server's last word; else whether a new session must come first."""
        if isinstance(error, FedringError):
            return False
        status, reason, detail = status_of(error), reason_of(error), _detail_of(error)
        if status is UnknownRound.status:
            raise RoundOver(self._ended() or reason, detail) from error
        if reason in _ON_THE_WAY:
            return False
        if status in _FINAL or reason == TooLarge.reason:
            raise UpdateRefused(reason, detail) from error
        return status in (StatusCode.UNAUTHENTICATED, StatusCode.ABORTED)

    async def _check(self, error: aio.AioRpcError | FedringError, tries: int) -> None:
        """Return if there may be another try after `tries` in which bytes were damaged on their way.

        The second one is in chunks, the third over a new connection.

        Raises:
            UpdateRefused: if there was a third one.
            DamagedSpool: if the update was damaged where it waited.
        """
        if not await asyncio.to_thread(lambda: self._spooled.is_sound):
            raise DamagedSpool from error
        if tries >= MOST_TRIES:
            raise UpdateRefused(reason_of(error), f"{_detail_of(error)} (after {tries} tries)") from error
        log.warning("the update of round %d is sent again: %s", self._spooled.header.round, _detail_of(error))

    async def _push_small(self) -> None:
        """All in one message."""
        header, connection = self._spooled.header, self._connection
        with self._spooled.reader() as read:
            update = pb.SmallUpdate(offer=self._spooled.offer, payload=bytes(read(0, header.total_bytes)))
        seconds = connection.session.no_progress_seconds
        async with connection.small_updates() as call:
            await _write(call, update, seconds)
            await _read(call, pb.Accepted, seconds)
        connection.last_success = time.monotonic()
        connection.metrics.upload_bytes.inc(header.total_bytes)

    async def _push(self) -> None:
        """The header, and the chunks that the server does not have."""
        header, seconds = self._spooled.header, self._connection.session.no_progress_seconds
        call = self._connection.push_update(metadata=self._connection.metadata)
        try:
            await _write(call, pb.ClientUpdate(offer=self._spooled.offer), seconds)
            reply = await _read(call, pb.UpdateReply, seconds)
            if reply.WhichOneof("reply") == "accepted":
                return
            with self._spooled.reader() as read:
                for offset, message in chunks(read, start=reply.resume_offset, total=header.total_bytes):
                    if why := self._ended():
                        raise GivenUp(why)
                    await _write(call, message, seconds)
                    self._connection.metrics.upload_bytes.inc(min(CHUNK_BYTES, header.total_bytes - offset))
                    self._tell(offset / header.total_bytes)
            await call.done_writing()
            reply = await _read(call, pb.UpdateReply, seconds)
            if reply.WhichOneof("reply") != "accepted":
                raise Unavailable("the server asked for more than the whole update")
        finally:
            call.cancel()


def _detail_of(error: aio.AioRpcError | FedringError) -> str:
    return (error.details() or "") if isinstance(error, aio.AioRpcError) else str(error)


async def _write(call: Any, message: pb.ClientUpdate | pb.SmallUpdate | bytes, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await call.write(message)
    except TimeoutError as error:
        raise Stalled(f"the server read nothing for {seconds:g} s") from error
    except asyncio.InvalidStateError:  # the call is over, which only reading explains
        await _read(call, pb.UpdateReply, seconds)


async def _read(call: Any, kind: type[T], seconds: float) -> T:
    try:
        async with asyncio.timeout(seconds):
            reply = await call.read()
    except TimeoutError as error:
        raise Stalled(f"the server said nothing for {seconds:g} s") from error
    if not isinstance(reply, kind):
        raise Unavailable("the server ended the call without an answer")
    return reply
