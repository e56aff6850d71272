"""The acceptance of updates: bytes synced and rows committed.

One commit is for many uploads at once. Uploads that end while a commit is under way share the next one (group commit),
so that a hundred small updates cost a handful of syncs. A batch holds its rounds' `settling` locks from the last check
that they take it to the commit. So a round closes between two commits: what was accepted before is counted, what comes
after is refused.
"""

import asyncio
import time
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace

from fedring.rpc.errors import FedringError, OtherUpdate, Overloaded, Unavailable
from fedring.server.round import machine as rd
from fedring.server.round.open_round import OpenRound
from fedring.server.running.rounds import Rounds
from fedring.server.state.blob_interfaces import Partial
from fedring.server.state.blobs import MemoryPartial
from fedring.server.state.facts import Facts
from fedring.server.state.failures import StorageError
from fedring.server.state.rows import Acceptance, UpdateRow
from fedring.server.update.metrics import UpdateMetrics
from fedring.server.update.receipts import Receipts

_LONGEST_GATHERING = 0.02  # seconds; a few commits
_MOST_GATHERED = 64  # updates that a batch waits for; more may have come during the commit before


@dataclass(slots=True)
class _Offer:
    partial: Partial
    row: UpdateRow
    client_head: str  # of its client's own log
    done: asyncio.Future[tuple[bool, str]]


class Acceptor:
    """Commits admitted updates, and tells their rounds afterwards.

    A round is told when its updates are durable.
    """

    def __init__(self, rounds: Rounds, facts: Facts, metrics: UpdateMetrics, receipts: Receipts) -> None:
        self._rounds, self._facts, self._metrics, self._receipts = rounds, facts, metrics, receipts
        self._offers, self._offered = list[_Offer](), asyncio.Event()
        self._missing: dict[int, int] | None = None  # how many updates each round waits for, while a batch gathers

    async def accept(self, partial: Partial, row: UpdateRow, client_head: str = "") -> tuple[bool, str]:
        """Accept an update durably. The partial is the acceptor's from now on.

        The update is committed even if the caller goes away: its client will ask again, and learn that it counts.

        Args:
            partial: Its payload.
            row: Its row.
            client_head: The head of its client's own log.

        Returns:
            Whether the same update had been accepted before; and the head of the receipts.

        Raises:
            UnknownRound: if the round no longer takes the update.
            OtherUpdate: if another update of the client was accepted for the round.
            RefusedCommit: if the disk is full, or refuses the update for another reason.
        """
        done: asyncio.Future[tuple[bool, str]] = asyncio.get_running_loop().create_future()
        self._offers.append(offer := _Offer(partial, row, client_head, done))
        if self._missing is None or self._completes(self._missing, offer):
            self._offered.set()
        return await done

    async def run(self) -> None:
        """Commit offered updates until cancelled.

        This ends with the error of a disk that cannot be trusted.
        """
        while True:
            await self._offered.wait()
            await self._gather()
            self._offered.clear()
            offers, self._offers = self._offers, []
            async with AsyncExitStack() as stack:
                into = {open_.row.round: open_ for open_ in map(self._into, offers) if open_ is not None}
                for number in sorted(into):
                    await stack.enter_async_context(into[number].settling)
                room = {number: open_.kind.room for number, open_ in into.items()}
                await self._settle([offer for offer in offers if self._in_time(offer, room)])

    async def _gather(self) -> None:
        """Let small updates join while their rounds wait for more anyway.

        A commit costs as much processor time as several small updates. The last update of a round does not wait, nor
        those before it that wait with it, so a round ends later only if clients that it waits for fail meanwhile.
        """
        missing = self._missing = {}
        if not any(self._completes(missing, offer) for offer in self._offers):
            self._offered.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(_LONGEST_GATHERING):
                    await self._offered.wait()
        self._missing = None

    def _completes(self, missing: dict[int, int], offer: _Offer) -> bool:
        """Count an offer, and return whether the batch should wait no longer."""
        open_ = self._into(offer)
        if open_ is None or len(self._offers) >= _MOST_GATHERED or not isinstance(offer.partial, MemoryPartial):
            return True
        if (number := open_.row.round) not in missing:
            missing[number] = _awaited(open_, time.monotonic())
        missing[number] -= 1
        return missing[number] <= 0

    def _into(self, offer: _Offer) -> OpenRound | None:
        """Return the open round in which an offer would count, or None."""
        told = self._rounds.told(offer.row.round, offer.row.client_id)
        return self._rounds.into(told) if told is not None else None

    def _in_time(self, offer: _Offer, room: dict[int, float]) -> bool:
        """Return whether a round still takes the update, and note which.

        If not, its waiting upload gets the reason.

        Args:
            offer: the update.
            room: how many updates each round takes whose lock is held, without those of this batch before.
        """
        row = offer.row
        try:
            told = self._rounds.deliverable(self._facts.store.run_id, row.round, row.client_id)
            open_ = self._rounds.into(told)
            # Another round may have been opened while the lock of the one before was waited for.
            if open_ is None or room.get(open_.row.round, 0) < 1:
                raise Unavailable("the round has all its updates: try again")
        except FedringError as error:
            offer.partial.close()
            if not offer.done.done():
                offer.done.set_exception(error)
            return False
        room[open_.row.round] -= 1
        if open_ is not told:
            offer.row = replace(row, buffer=open_.row.round, staleness=open_.published - told.published)
        return True

    async def _settle(self, offers: list[_Offer]) -> None:
        """Commit a batch, and tell each upload the outcome."""
        if not offers:
            return
        try:
            head = await self._note(offers)
            outcomes = await self._commit(offers)
        except BaseException as error:
            for offer in offers:
                if not offer.done.done():
                    offer.done.set_exception(error)
            if not isinstance(error, RefusedCommit):
                raise
            return
        for offer, outcome in zip(offers, outcomes, strict=True):
            if offer.done.done():
                continue
            if outcome is Acceptance.OTHER:
                text = f"another update of {offer.row.client_id} was accepted for round {offer.row.round}"
                offer.done.set_exception(OtherUpdate(text))
            else:
                offer.done.set_result((outcome is Acceptance.ALREADY, head))

    async def _note(self, offers: list[_Offer]) -> str:
        try:
            return await self._receipts.note(self._facts, [(offer.row, offer.client_head) for offer in offers])
        except OSError as error:
            for offer in offers:  # they stay on the disk, and their clients go on with them
                offer.partial.close()
            raise RefusedCommit(f"the receipts cannot be written: {error}", reason="disk_error") from error

    async def _commit(self, offers: list[_Offer]) -> list[Acceptance]:
        batch = [(offer.partial, offer.row) for offer in offers]
        try:
            outcomes = await self._facts.db(self._facts.commit_updates, batch)
        except StorageError as error:
            raise RefusedCommit(str(error), reason=error.reason) from error
        fresh = [offer.row for offer, outcome in zip(offers, outcomes, strict=True) if outcome is Acceptance.NEW]
        for number in sorted({row.buffer for row in fresh}):
            if (open_ := self._rounds.get(number)) is not None:
                mine = [row for row in fresh if row.buffer == number]
                self._metrics.accepted(mine, norm=not open_.transforms.hide_norms)
                self._rounds.accepted(open_, mine)
        return outcomes


def _awaited(open_: OpenRound, now: float) -> int:
    """Return how many updates a round still waits for.

    `now` is in monotonic seconds. One worker delivers for its whole group. In a round without an end for its commands,
    each update makes room for another client. A round that may end in a moment, by the clock, waits for nothing, nor
    does one whose clock depends on when updates came.
    """
    round_ = open_.state.round
    if round_ is None or open_.group is not None or open_.kind.lasting or round_.rules.straggler_factor:
        return 1
    if rd.wake_at(open_.state, now) <= now + _LONGEST_GATHERING:
        return 1
    needed = round_.rules.min_to_aggregate if round_.rules.close_at_minimum else rd.updates_needed(round_)
    missing = min(needed - len(round_.delivered), open_.kind.room)
    return min(len(rd.pending(open_.state, now)), int(missing))


class RefusedCommit(Overloaded):
    """Nothing of the batch was accepted, but the disk is sound.

    It may be full, for example.
    """
