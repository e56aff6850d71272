"""Events for operators.

They are kept in the store and sent to watchers at once.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime

from fedring.rpc.errors import Overloaded
from fedring.server.state.rows import EventRow
from fedring.v1 import control_pb2 as pb

log = logging.getLogger(__name__)

RECENT = 4096
"""How many of the newest events are in memory, so that watchers can still read them."""

TOGETHER, TOGETHER_BYTES = 64, 1 << 16
"""The most events that a watcher is given together, and their most bytes."""

_GATHER_SECONDS = 0.2  # events of this time share a commit
_LEVELS = {
    "update_accepted": logging.DEBUG,
    "update_refused": logging.WARNING,
    "client_failed": logging.WARNING,
    "evaluation_failed": logging.WARNING,
    "client_lied": logging.WARNING,
    "client_refused": logging.WARNING,
    "other_samples": logging.WARNING,
    "storage_failed": logging.ERROR,
    "blob_damaged": logging.ERROR,
    "database_failed_over": logging.ERROR,
}
# These events are not stored: the first is in the updates' rows, the second is soon of no interest.
_TRANSIENT = frozenset({"update_accepted", "round_waits"})


def rfc3339(seconds: float | None) -> str:
    """Format seconds since 1970 as a UTC time.

    The text is empty for 0 or None.
    """
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds") if seconds else ""


def printable(text: str) -> str:
    """Replace characters that could break a log or terminal by spaces.

    Parts of the text come from clients.
    """
    return text if text.isprintable() else "".join(letter if letter.isprintable() else " " for letter in text)


class Journal:
    """The events of a server, in order.

    Their ids increase, also across restarts: an id is the time in microseconds since 1970, or one above the last id.
    """

    def __init__(self) -> None:
        self._last_id = 0
        self._recent: deque[pb.Event] = deque(maxlen=RECENT)
        self._watchers: set[_Watcher] = set()
        self._unsaved: list[EventRow] = []
        self._to_save = asyncio.Event()

    def begin(self, last_id: int) -> None:
        """Make all later ids greater than `last_id`.

        This holds even if the clock was set back.
        """
        self._last_id = max(self._last_id, last_id)

    def write(
        self, kind: str, text: str, *, job_id: int = 0, client_id: str = "", state: pb.Round | None = None
    ) -> None:
        """Log an event, send it to watchers, and queue it for storage.

        A watcher that has not read its last RECENT events is dropped.
        """
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
        self._send(event)
        if kind not in _TRANSIENT and len(self._unsaved) < RECENT:
            self._unsaved.append(EventRow(event.id, at, kind, text, job_id, number, client_id))
            self._to_save.set()

    def repeat(self, event: pb.Event) -> None:
        """Send an event to watchers that another process has stored."""
        self._last_id = max(self._last_id, event.id)
        self._send(event)

    def _send(self, event: pb.Event) -> None:
        self._recent.append(event)
        for watcher in tuple(self._watchers):
            # A watcher that reads too slowly is dropped: it must hold up neither the round nor others.
            if len(watcher.news) >= RECENT:
                self._watchers.discard(watcher)
            else:
                watcher.tell(event)

    @property
    def last_id(self) -> int:
        """The id of the newest event."""
        return self._last_id

    def recent(self, after: int = 0) -> list[pb.Event]:
        """Return the events in memory with ids above `after`, oldest first."""
        return [event for event in self._recent if event.id > after]

    @property
    def oldest(self) -> int:
        """The id of the oldest event in memory.

        Older events are in the store.
        """
        return self._recent[0].id if self._recent else self._last_id + 1

    def follow(self, after: int) -> AsyncGenerator[Sequence[pb.Event]]:
        """Watch events: known ones above `after`, then all new ones.

        The known ones are those in memory. New are those written from this call on. Those that wait to be read at the
        same time come together, as far as they are small.

        Args:
            after: an event's id; 0 for new events only.

        Raises:
            Overloaded: in the iteration, if the watcher reads too slowly.
        """
        watcher = _Watcher()
        known = [event for event in self._recent if after and event.id > after]
        self._watchers.add(watcher)
        return self._watch(known, watcher)

    async def _watch(self, known: list[pb.Event], watcher: "_Watcher") -> AsyncGenerator[Sequence[pb.Event]]:
        try:
            for group in _groups(known):
                yield group
            while watcher in self._watchers:
                await watcher.told.wait()
                for group in _groups(watcher.take()):
                    yield group
                if watcher.ended and not watcher.news:
                    return
            raise Overloaded(f"the watcher reads too slowly: {RECENT} events wait for it; watch again")
        finally:
            self._watchers.discard(watcher)

    def close(self) -> None:
        """End all watchers' iterations, after the events that were written before."""
        for watcher in self._watchers:
            watcher.ended = True
            watcher.told.set()

    def unsaved(self) -> list[EventRow]:
        """Return the events that have not been stored yet.

        The caller stores them.
        """
        rows, self._unsaved = self._unsaved, []
        return rows

    async def save(self, append: Callable[[list[EventRow]], Awaitable[None]]) -> None:
        """Store events in batches, until cancelled.

        There are batches because accepting updates waits for each commit.
        """
        while True:
            await self._to_save.wait()
            await asyncio.sleep(_GATHER_SECONDS)
            self._to_save.clear()
            await append(self.unsaved())


class _Watcher:
    """The events that somebody who watches has not read yet.

    Updates are many, and a queue of asyncio costs several times as much for each.
    """

    __slots__ = ("ended", "news", "told")

    def __init__(self) -> None:
        self.news, self.told, self.ended = list[pb.Event](), asyncio.Event(), False

    def tell(self, event: pb.Event) -> None:
        """Add an event."""
        self.news.append(event)
        self.told.set()

    def take(self) -> list[pb.Event]:
        """Return at most TOGETHER events, the oldest first, and forget them."""
        taken, self.news = self.news[:TOGETHER], self.news[TOGETHER:]
        if not self.news and not self.ended:
            self.told.clear()
        return taken


def _groups(events: Iterable[pb.Event]) -> Iterator[Sequence[pb.Event]]:
    """Divide events into groups that may come together.

    A round of many clients may make an event as long as a message may be, so a large one comes alone.
    """
    group, size = list[pb.Event](), 0
    for event in events:
        size += event.ByteSize()
        if group and (len(group) == TOGETHER or size > TOGETHER_BYTES):
            yield group
            group, size = [], event.ByteSize()
        group.append(event)
    if group:
        yield group
