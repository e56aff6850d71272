"""Uploads one spooled update until the server has accepted or refused it."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from grpc import aio

from fedring.client.errors import RoundOver, UpdateRefused
from fedring.client.session.connection import Connection
from fedring.client.session.retry import MOST_TRIES, RetryPolicy, Verdict
from fedring.client.session.tries import Tries
from fedring.client.transfer.spool import Spooled
from fedring.rpc.chunks import CHUNK_BYTES, chunks
from fedring.rpc.contract import SMALL_BYTES
from fedring.rpc.errors import FedringError, Stalled, TooLarge, Unavailable, UnknownRound, reason_of, status_of
from fedring.v1 import federation_pb2 as pb

log = logging.getLogger(__name__)

T = TypeVar("T")

_OTHER_ROUND = "wrong_model"
"""An update always begins with its round's model. So the server was reverted: another round has the number now."""

DAMAGE_REASONS = {
    "digest_mismatch",
    "damaged",
    "bad_chunk",
    "bad_request",
    "truncated",
    "unknown_method",
    "unimplemented",
}
"""The reasons for which a server refuses an upload, or the beginning of one, only if bytes were damaged on the way."""

POLICY = RetryPolicy({**dict.fromkeys(DAMAGE_REASONS, Verdict.AGAIN), TooLarge.reason: Verdict.DROP})


class Undecided(RoundOver):
    """The deadline passed before the server's answer about the update."""


class GivenUp(RoundOver):
    """The client stopped sending, because its round had ended.

    The server has not refused the update.
    """


class DamagedSpool(UpdateRefused):
    """The update was damaged on the disk before its delivery.

    The server did not have it yet, so it is lost.
    """

    def __init__(self) -> None:
        super().__init__("damaged_spool", "the update was damaged while it waited to be sent")


class Upload:
    """The upload of one update, used once.

    Args:
        connection: To the server.
        spooled: The update.
        ended: Returns why the update is no longer wanted; empty while it is.
        tell: Is called with the share of the payload that was sent, 0 to 1.
    """

    def __init__(
        self, connection: Connection, spooled: Spooled, ended: Callable[[], str], tell: Callable[[float], None]
    ) -> None:
        self._connection = connection
        self._spooled = spooled
        self._ended = ended
        self._tell = tell
        self._has_left = spooled.unsent is None  # whether any of it may have

    async def run(self, deadline: float) -> None:
        """Send the update until the server has accepted it.

        When the update is no longer wanted, it is not sent any more. If any of it has left, the server is still asked
        about it, because it may have accepted it in a call whose answer was lost.

        Args:
            deadline: Until when to try, in monotonic seconds.

        Raises:
            UpdateRefused: If the server refuses the update for good; DamagedSpool if it was damaged on the disk.
            Undecided: If the deadline has passed.
            GivenUp: If the update is no longer wanted and the server does not have all of it.
            RoundOver: If the server says that the round takes no updates.
        """
        tries = Tries(self._connection, POLICY)
        small = self._spooled.header.total_bytes <= SMALL_BYTES and not self._ended()
        while True:
            if not self._has_left and (why := self._ended()):
                raise GivenUp(why)  # to ask would tell what its header says of the training
            try:
                with tries.one():
                    return await (self._push_small() if small else self._push())
            except (aio.AioRpcError, FedringError) as error:
                verdict = tries.judge(error)
                if reason_of(error) in DAMAGE_REASONS and not await asyncio.to_thread(lambda: self._spooled.is_sound):
                    raise DamagedSpool from error
                if verdict is Verdict.DROP:
                    raise self._refusal(error) from error
                if verdict is Verdict.AGAIN:
                    log.warning("the update of round %d is sent again: %s", self._spooled.header.round, _detail(error))
            small = False  # From now on the server is asked first, because it may have the update already.
            try:
                await tries.wait(deadline=deadline)
            except TimeoutError as error:
                raise Undecided(
                    "deadline", "the deadline passed before the server said whether it has the update"
                ) from error

    def _refusal(self, error: aio.AioRpcError | FedringError) -> RoundOver:
        """Return why the update is not sent any more."""
        reason, detail = reason_of(error), _detail(error)
        if status_of(error) is UnknownRound.status or reason == _OTHER_ROUND:
            return RoundOver(self._ended() or reason, detail)
        if reason in DAMAGE_REASONS:
            detail += f" (after {MOST_TRIES} tries)"
        return UpdateRefused(reason, detail)

    def _leaves(self) -> None:
        if not self._has_left:
            self._spooled.leaves()
        self._has_left = True

    def _heard(self, accepted: pb.Accepted) -> None:
        """Note the head of the server's log, which has this update."""
        self._connection.audited, self._connection.audit_head = self._spooled.offer.name, accepted.audit_head

    async def _push_small(self) -> None:
        """Send everything in one message."""
        header, connection = self._spooled.header, self._connection
        with self._spooled.reader() as read:
            update = pb.SmallUpdate(offer=self._spooled.offer, payload=bytes(read(0, header.total_bytes)))
        seconds = connection.session.no_progress_seconds
        async with connection.small_updates() as call:
            await _write(call, update, seconds, self._leaves)
            self._heard(await _read(call, pb.Accepted, seconds))
        connection.last_success = time.monotonic()
        connection.metrics.upload_bytes.inc(header.total_bytes)

    async def _push(self) -> None:
        """Offer the update, and send the missing chunks.

        Only chunks that the server does not have are sent.
        """
        header, seconds = self._spooled.header, self._connection.session.no_progress_seconds
        call = self._connection.push_update(metadata=self._connection.metadata)
        try:
            await _write(call, pb.ClientUpdate(offer=self._spooled.offer), seconds, self._leaves)
            reply = await _read(call, pb.UpdateReply, seconds)
            # The server may have the update from an earlier call, whose answer was lost.
            if reply.WhichOneof("reply") == "accepted":
                return self._heard(reply.accepted)
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
                raise Unavailable("the server did not accept the update after its last byte")
            self._heard(reply.accepted)
        finally:
            call.cancel()


def _detail(error: aio.AioRpcError | FedringError) -> str:
    return (error.details() or "") if isinstance(error, aio.AioRpcError) else str(error)


async def _write(
    call: Any,
    message: pb.ClientUpdate | pb.SmallUpdate | bytes,
    seconds: float,
    leaves: Callable[[], None] | None = None,
) -> None:
    """Send a message.

    With the first one, `leaves` is called just before, if there is a connection: without one, nothing leaves.
    """
    try:
        async with asyncio.timeout(seconds):
            if leaves is not None:
                with suppress(aio.AioRpcError):  # writing tells it, too
                    await call.wait_for_connection()
                    leaves()
            await call.write(message)
    except TimeoutError as error:
        raise Stalled(f"the server read nothing for {seconds:g} s") from error
    except asyncio.InvalidStateError:  # The call has ended; reading tells why.
        await _read(call, pb.UpdateReply, seconds)


async def _read(call: Any, kind: type[T], seconds: float) -> T:
    try:
        async with asyncio.timeout(seconds):
            reply = await call.read()
    except TimeoutError as error:
        raise Stalled(f"the server did not answer for {seconds:g} s") from error
    if not isinstance(reply, kind):
        raise Unavailable("the server ended the call without an answer")
    return reply
