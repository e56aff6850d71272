"""The stream of changes: viewers receive what has changed, and without viewers nothing is read."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from fedring.web import feed as feeds
from fedring.web.feed import MOST_VIEWERS, Feed


class Facts:
    """The facts that the page shows. Counts how often the feed has read them."""

    def __init__(self) -> None:
        self.now: dict[str, Any] = {"round": 1, "clients": ["a"]}
        self.reads = 0
        self.was_read = asyncio.Event()

    async def read(self) -> dict[str, Any]:
        self.reads += 1
        self.was_read.set()
        return self.now

    async def next_read(self) -> None:
        self.was_read.clear()
        await self.was_read.wait()


class Viewer:
    """A browser that shows the page, from the point of view of the feed."""

    def __init__(self, feed: Feed) -> None:
        self.status = 0
        self._messages: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._left = asyncio.Event()
        self._call = asyncio.create_task(self._view(feed))

    async def next_change(self) -> dict[str, Any]:
        """Return the next message that is not a beat."""
        while (text := await self.next_message()).startswith("event: beat"):
            pass
        assert text.startswith("data: ")
        assert text.endswith("\n\n")
        change: dict[str, Any] = json.loads(text.removeprefix("data: "))
        return change

    async def next_message(self) -> str:
        async with asyncio.timeout(60):
            message = await self._messages.get()
        assert message is not None, "the stream has ended"
        return message.decode()

    async def end(self) -> None:
        """Return when the stream has ended by itself."""
        async with asyncio.timeout(60):
            await self._call

    async def leave(self) -> None:
        self._left.set()
        await self.end()

    async def _view(self, feed: Feed) -> None:
        await feed({"type": "http", "method": "GET", "path": "/", "headers": []}, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message["body"]:
            self._messages.put_nowait(message["body"])


@asynccontextmanager
async def running(facts: Facts) -> AsyncIterator[Feed]:
    feed = Feed(facts.read)
    run = asyncio.create_task(feed.run())
    try:
        yield feed
    finally:
        run.cancel()


@pytest.fixture(autouse=True)
def _short_periods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "PERIOD", 0.001)
    monkeypatch.setattr(feeds, "SHARE", 1.0)


async def test_a_viewer_first_receives_everything_and_then_what_has_changed() -> None:
    facts = Facts()
    async with running(facts) as feed:
        viewer = Viewer(feed)
        assert await viewer.next_change() == {"round": 1, "clients": ["a"]}
        facts.now = {"round": 2, "clients": ["a"]}
        assert await viewer.next_change() == {"round": 2}
        late = Viewer(feed)
        assert await late.next_change() == {"round": 2, "clients": ["a"]}
        await viewer.leave()
        await late.leave()


async def test_the_facts_are_not_read_without_viewers() -> None:
    facts = Facts()
    async with running(facts) as feed:
        viewer = Viewer(feed)
        await viewer.next_change()
        await viewer.leave()
        await asyncio.wait([asyncio.create_task(facts.next_read())], timeout=0.05)  # one read may have begun
        reads = facts.reads
        done, _ = await asyncio.wait([task := asyncio.create_task(facts.next_read())], timeout=0.2)
        task.cancel()
        assert (done, facts.reads) == (set(), reads)


async def test_a_viewer_that_comes_back_receives_the_present_state() -> None:
    facts = Facts()
    async with running(facts) as feed:
        viewer = Viewer(feed)
        await viewer.next_change()
        await viewer.leave()
        facts.now = {"round": 9}
        again = Viewer(feed)
        assert await again.next_change() == {"round": 9}
        await again.leave()


async def test_a_viewer_receives_beats_while_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "BEAT_SECONDS", 0.01)
    async with running(Facts()) as feed:
        viewer = Viewer(feed)
        await viewer.next_change()
        assert await viewer.next_message() == "event: beat\ndata:\n\n"
        await viewer.leave()


async def test_the_number_of_viewers_is_limited() -> None:
    async with running(Facts()) as feed:
        viewers = [Viewer(feed) for _ in range(MOST_VIEWERS)]
        for viewer in viewers:
            await viewer.next_change()
        refused = Viewer(feed)
        await refused.end()
        assert refused.status == 503
        await viewers.pop().leave()
        admitted = Viewer(feed)
        await admitted.next_change()
        for viewer in [*viewers, admitted]:
            await viewer.leave()


async def test_an_error_while_the_page_is_updated_is_logged_and_the_feed_continues(
    caplog: pytest.LogCaptureFixture,
) -> None:
    facts = Facts()
    async with running(facts) as feed:
        viewer = Viewer(feed)
        await viewer.next_change()
        with caplog.at_level(logging.ERROR):
            facts.now = {"round": float("nan")}  # this is not valid JSON
            await facts.next_read()
            await facts.next_read()
        assert "cannot be brought up to date" in caplog.text
        facts.now = {"round": 3}
        assert await viewer.next_change() == {"round": 3}
        await viewer.leave()


async def test_all_streams_end_when_the_feed_is_closed() -> None:
    async with running(Facts()) as feed:
        viewer = Viewer(feed)
        await viewer.next_change()
        feed.close()
        await viewer.end()
        late = Viewer(feed)
        await late.end()
        assert late.status == 503
