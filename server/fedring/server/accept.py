"""The moment an update is accepted: bytes synced, row committed, for many uploads at once.

Uploads that end while a commit is under way share the next one (group commit), so
that a hundred small updates cost a handful of syncs. `closing` lets the round close
between two commits: what was accepted before is counted, what comes after is refused.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fedring.rpc.errors import OtherUpdate, Overloaded
from fedring.server.blobs import FilePartial, MemoryPartial
from fedring.server.rows import UpdateRow
from fedring.server.store_api import Acceptance

Partial = FilePartial | MemoryPartial
Commit = Callable[[list[tuple[Partial, UpdateRow]]], Awaitable[list[Acceptance]]]


@dataclass(slots=True)
class _Offer:
    partial: Partial
    row: UpdateRow
    may: Callable[[], object]  # raises if the round is not open any more
    done: asyncio.Future[bool]


class Acceptor:
    """Commits offered updates; `commit` returns what became of each."""

    def __init__(self, commit: Commit) -> None:
        self._commit = commit
        self._offers: asyncio.Queue[_Offer] = asyncio.Queue()
        self._lock = asyncio.Lock()

    async def accept(self, partial: Partial, row: UpdateRow, may: Callable[[], object]) -> bool:
        """Whether the update was known already, once it is durable. The partial is the acceptor's from now on.

        It is committed also if the caller goes away: its client will ask again, and learn that it counts.
        Raises what `may` raises if it comes too late, and OtherUpdate if another one of the client was faster.
        """
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._offers.put_nowait(_Offer(partial, row, may, done))
        return await done

    @asynccontextmanager
    async def closing(self) -> AsyncIterator[None]:
        """No commit is under way inside."""
        async with self._lock:
            yield

    async def run(self) -> None:
        """Commit what is offered until cancelled; ends with the error of a disk that cannot be trusted."""
        while True:
            offers = [await self._offers.get()]
            while not self._offers.empty():
                offers.append(self._offers.get_nowait())
            async with self._lock:
                await self._settle([offer for offer in offers if _still(offer)])

    async def _settle(self, offers: list[_Offer]) -> None:
        if not offers:
            return
        try:
            outcomes = await self._commit([(offer.partial, offer.row) for offer in offers])
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
                offer.done.set_result(outcome is Acceptance.ALREADY)


class RefusedCommit(Overloaded):
    """Nothing of the batch was accepted, but the disk can be trusted: it is full, say."""


def _still(offer: _Offer) -> bool:
    try:
        offer.may()
    except Exception as error:  # noqa: BLE001  # handed to the one who waits
        offer.partial.close()
        if not offer.done.done():
            offer.done.set_exception(error)
        return False
    return True
