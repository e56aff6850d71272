"""A stream of changes, for everybody with the page open.

While nobody looks, nothing is read.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

log = logging.getLogger(__name__)

PERIOD = 0.25
"""The least time from one look at the facts to the next, in seconds."""
SHARE = 0.05
"""The largest share of the time that is spent on looking."""
BEAT_SECONDS = 5.0
"""Seconds between two signs of life. A viewer that hears nothing for much longer has lost the connection."""
MOST_VIEWERS = 16

_BEAT = "event: beat\ndata:\n\n"


class Feed:
    """An ASGI application that streams changes of `look()` as JSON.

    Each event is one JSON object with the parts that have changed.
    """

    def __init__(self, look: Callable[[], Awaitable[Mapping[str, Any]]]) -> None:
        self._look = look
        self._parts: dict[str, tuple[int, str]] = {}  # each part with the revision in which it changed last
        self._revision = 0
        self._viewers = 0
        self._wanted = asyncio.Event()  # set while somebody looks
        self._moved = asyncio.Event()  # set, and replaced by a new event, with each change
        self._closed = False

    async def run(self) -> None:
        """Look again and again while somebody wants to know, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await self._wanted.wait()
            began = loop.time()
            await self._refresh()
            await asyncio.sleep(max(PERIOD, (loop.time() - began) / SHARE))

    def close(self) -> None:
        """End all streams, and let no new one begin."""
        self._closed = True
        self._moved.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._closed or self._viewers >= MOST_VIEWERS:
            full = PlainTextResponse("too many look already", 503, {"Retry-After": "5"})
            return await full(scope, receive, send)
        self._viewers += 1
        self._wanted.set()
        try:
            await StreamingResponse(self._events(), media_type="text/event-stream")(scope, receive, send)
        finally:
            self._viewers -= 1
            if not self._viewers:
                self._wanted.clear()
                self._parts.clear()  # the next viewer must not get old news

    async def _refresh(self) -> None:
        try:
            looked = await self._look()
            parts = {name: json.dumps(value, allow_nan=False) for name, value in looked.items()}
        except Exception:  # a fault of the page must not end the rounds
            log.exception("the page cannot be brought up to date")
            return
        changed = {name: text for name, text in parts.items() if self._parts.get(name, (0, ""))[1] != text}
        if changed:
            self._revision += 1
            self._parts |= {name: (self._revision, text) for name, text in changed.items()}
            self._moved.set()
            if not self._closed:
                self._moved = asyncio.Event()

    async def _events(self) -> AsyncIterator[str]:
        """Yield all parts at first, then those that change.

        A slow reader misses values that were replaced meanwhile.
        """
        seen = 0
        while not self._closed:
            news = [f"{json.dumps(name)}:{text}" for name, (at, text) in self._parts.items() if at > seen]
            seen, moved = self._revision, self._moved
            if news:
                yield f"data: {{{','.join(news)}}}\n\n"
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(BEAT_SECONDS):
                    await moved.wait()
                    continue
            yield _BEAT
