"""What happened, for operators: kept in the store, and told at once to whoever watches."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime

from fedring.rpc.errors import Overloaded
from fedring.server.state.rows import EventRow
from fedring.v1 import control_pb2 as pb

log = logging.getLogger(__name__)

RECENT = 4096
"""Events that a late watcher can still be told."""

_GATHER_SECONDS = 0.2  # in which events share a commit
_LEVELS = {
    "update_accepted": logging.DEBUG,
    "update_refused": logging.WARNING,
    "client_failed": logging.WARNING,
    "client_refused": logging.WARNING,
    "storage_failed": logging.ERROR,
    "blob_damaged": logging.ERROR,
}
_TRANSIENT = frozenset({"update_accepted", "round_waits"})  # the updates' own rows say it; soon of no interest


def rfc3339(seconds: float | None) -> str:
    """A wall-clock time for people and programs, UTC; empty for none."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds") if seconds else ""


def printable(text: str) -> str:
    """`text` without what could break a log or a terminal: part of it comes from clients."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


class Journal:
    """Events in order, with ids that rise, also across restarts: microseconds since 1970, or one above the last."""

    def __init__(self) -> None:
        self._last_id = 0
        self._recent: deque[pb.Event] = deque(maxlen=RECENT)
        self._watchers: set[asyncio.Queue[pb.Event | None]] = set()
        self._unsaved: list[EventRow] = []
        self._to_save = asyncio.Event()

    def begin(self, last_id: int) -> None:
        """All ids from now on are above `last_id`, also if the clock was set back."""
        self._last_id = max(self._last_id, last_id)

    def write(
        self, kind: str, text: str, *, job_id: int = 0, client_id: str = "", state: pb.Round | None = None
    ) -> None:
        """Log the event, tell it to all watchers, and queue it for the store."""
        number = state.round if state else 0
        at = time.time()
        text = printable(text)
        log.log(
            _LEVELS.get(kind, logging.INFO),
            "%s",
            text,
            extra={"event": kind, "job": job_id, "round": number, "client": client_id},
        )
        self._last_id = max(self._last_id + 1, int(at * 1e6))
        event = pb.Event(
            id=self._last_id,
            at=rfc3339(at),
            kind=kind,
            job_id=job_id,
            round=number,
            client_id=client_id,
            text=text,
            state=state,
        )
        self._recent.append(event)
        for queue in list(self._watchers):
            if queue.full():
                self._watchers.discard(queue)
            else:
                queue.put_nowait(event)
        if kind not in _TRANSIENT and len(self._unsaved) < RECENT:
            self._unsaved.append(EventRow(event.id, at, kind, text, job_id, number, client_id))
            self._to_save.set()

    @property
    def last_id(self) -> int:
        """The id of the newest event."""
        return self._last_id

    def recent(self, after: int = 0) -> list[pb.Event]:
        """The events above the id `after` that are remembered here, oldest first."""
        return [event for event in self._recent if event.id > after]

    @property
    def oldest(self) -> int:
        """The id of the oldest event that is remembered here; older ones are in the store."""
        return self._recent[0].id if self._recent else self._last_id + 1

    def follow(self, after: int) -> AsyncIterator[pb.Event]:
        """Every event after the id `after`, as far as it is remembered, and all from this call on; 0 = only those."""
        queue: asyncio.Queue[pb.Event | None] = asyncio.Queue(RECENT)
        known = [event for event in self._recent if after and event.id > after]
        self._watchers.add(queue)
        return self._told(known, queue)

    async def _told(self, known: list[pb.Event], queue: asyncio.Queue[pb.Event | None]) -> AsyncIterator[pb.Event]:
        try:
            for event in known:
                yield event
            while queue in self._watchers:
                if (news := await queue.get()) is None:
                    return
                yield news
            raise Overloaded("the watcher reads too slowly")
        finally:
            self._watchers.discard(queue)

    def close(self) -> None:
        """No more is told to watchers; those that read have been told everything."""
        for queue in self._watchers:
            if not queue.full():
                queue.put_nowait(None)

    def unsaved(self) -> list[EventRow]:
        """What was not stored yet, which the caller stores."""
        rows, self._unsaved = self._unsaved, []
        return rows

    async def save(self, append: Callable[[list[EventRow]], Awaitable[None]]) -> None:
        """Keep storing what was written, in batches, until cancelled: a round's updates wait for each commit."""
        while True:
            await self._to_save.wait()
            await asyncio.sleep(_GATHER_SECONDS)
            self._to_save.clear()
            await append(self.unsaved())
