"""What happened, for operators: kept in the store, and told at once to whoever watches."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime

from fedring.rpc.errors import Overloaded
from fedring.server.rows import EventRow
from fedring.v1 import control_pb2 as pb

log = logging.getLogger(__name__)

RECENT = 4096
"""Events that a late watcher can still be told."""

_TRANSIENT = frozenset({"update_accepted"})  # the updates' own rows say it


def rfc3339(seconds: float | None) -> str:
    """A wall-clock time for people and programs, UTC; empty for none."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds") if seconds else ""


class Journal:
    """Events in order, with ids that rise, also across restarts: microseconds since 1970, or one above the last."""

    def __init__(self) -> None:
        self._last_id = 0
        self._recent: deque[pb.Event] = deque(maxlen=RECENT)
        self._watchers: set[asyncio.Queue[pb.Event]] = set()
        self._unsaved: asyncio.Queue[EventRow] = asyncio.Queue()

    def begin(self, last_id: int) -> None:
        """All ids from now on are above `last_id`, also if the clock was set back."""
        self._last_id = max(self._last_id, last_id)

    def write(
        self, kind: str, text: str, *, job_id: int = 0, client_id: str = "", state: pb.Round | None = None
    ) -> None:
        """Log the event, tell it to all watchers, and queue it for the store."""
        number = state.round if state else 0
        at = time.time()
        log.info("%s", text, extra={"event": kind, "job": job_id, "round": number, "client": client_id})
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
        if kind not in _TRANSIENT:
            self._unsaved.put_nowait(EventRow(event.id, at, kind, text, job_id, number, client_id))

    async def follow(self, after: int, ready: Callable[[], Awaitable[None]]) -> AsyncIterator[pb.Event]:
        """Every event after the id `after`, as far as it is remembered; 0 = from now on.

        `ready` is awaited once nothing can be missed any more.
        """
        queue: asyncio.Queue[pb.Event] = asyncio.Queue(RECENT)
        known = [event for event in self._recent if after and event.id > after]
        self._watchers.add(queue)
        try:
            await ready()
            for event in known:
                yield event
            while queue in self._watchers:
                yield await queue.get()
            raise Overloaded("the watcher reads too slowly")
        finally:
            self._watchers.discard(queue)

    async def save(self, append: Callable[[list[EventRow]], Awaitable[None]]) -> None:
        """Keep storing what was written, in batches, until cancelled."""
        while True:
            rows = [await self._unsaved.get()]
            while not self._unsaved.empty():
                rows.append(self._unsaved.get_nowait())
            await append(rows)
