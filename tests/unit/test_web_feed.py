"""The stream of changes: who looks is told what has changed, and while nobody looks nothing is done."""

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
    """What there is to see."""

    def __init__(self) -> None:
        self.now: dict[str, Any] = {"round": 1, "clients": ["a"]}
        self.looks = 0
        self.looked = asyncio.Event()

    async def look(self) -> dict[str, Any]:
        self.looks += 1
        self.looked.set()
        return self.now

    async def next_look(self) -> None:
        self.looked.clear()
        await self.looked.wait()


class Viewer:
    """A browser, as the feed sees it."""

    def __init__(self, feed: Feed) -> None:
        self.status = 0
        self._said: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._gone = asyncio.Event()
        self._call = asyncio.create_task(self._look(feed))

    async def news(self) -> dict[str, Any]:
        """The next message but beats."""
        while (said := await self.raw()).startswith("event: beat"):
            pass
        assert said.startswith("data: ")
        assert said.endswith("\n\n")
        message: dict[str, Any] = json.loads(said.removeprefix("data: "))
        return message

    async def raw(self) -> str:
        async with asyncio.timeout(60):
            said = await self._said.get()
        assert said is not None, "the stream has ended"
        return said.decode()

    async def end(self) -> None:
        """Return when the stream has ended by itself."""
        async with asyncio.timeout(60):
            await self._call

    async def leave(self) -> None:
        self._gone.set()
        await self.end()

    async def _look(self, feed: Feed) -> None:
        await feed({"type": "http", "method": "GET", "path": "/", "headers": []}, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message["body"]:
            self._said.put_nowait(message["body"])


@asynccontextmanager
async def running(facts: Facts) -> AsyncIterator[Feed]:
    feed = Feed(facts.look)
    run = asyncio.create_task(feed.run())
    try:
        yield feed
    finally:
        run.cancel()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "PERIOD", 0.001)
    monkeypatch.setattr(feeds, "SHARE", 1.0)


async def test_a_viewer_is_told_all_at_first_and_then_what_has_changed() -> None:
    facts = Facts()
    async with running(facts) as feed:
        viewer = Viewer(feed)
        assert await viewer.news() == {"round": 1, "clients": ["a"]}
        facts.now = {"round": 2, "clients": ["a"]}
        assert await viewer.news() == {"round": 2}
        late = Viewer(feed)
        assert await late.news() == {"round": 2, "clients": ["a"]}
        await viewer.leave()
        await late.leave()


async def test_nothing_is_done_while_nobody_looks() -> None:
    facts = Facts()
    async with running(facts) as feed:
        viewer = Viewer(feed)
        await viewer.news()
        await viewer.leave()
        await asyncio.wait([asyncio.create_task(facts.next_look())], timeout=0.05)  # one may be under way
        looks = facts.looks
        done, _ = await asyncio.wait([task := asyncio.create_task(facts.next_look())], timeout=0.2)
        task.cancel()
        assert (done, facts.looks) == (set(), looks)


async def test_who_comes_back_is_told_no_old_news() -> None:
    facts = Facts()
    async with running(facts) as feed:
        viewer = Viewer(feed)
        await viewer.news()
        await viewer.leave()
        facts.now = {"round": 9}
        again = Viewer(feed)
        assert await again.news() == {"round": 9}
        await again.leave()


async def test_a_viewer_to_whom_nothing_is_said_hears_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "BEAT_SECONDS", 0.01)
    async with running(Facts()) as feed:
        viewer = Viewer(feed)
        await viewer.news()
        assert await viewer.raw() == "event: beat\ndata:\n\n"
        await viewer.leave()


async def test_only_so_many_may_look_at_once() -> None:
    async with running(Facts()) as feed:
        viewers = [Viewer(feed) for _ in range(MOST_VIEWERS)]
        for viewer in viewers:
            await viewer.news()
        refused = Viewer(feed)
        await refused.end()
        assert refused.status == 503
        await viewers.pop().leave()
        welcome = Viewer(feed)
        await welcome.news()
        for viewer in [*viewers, welcome]:
            await viewer.leave()


async def test_a_fault_of_the_page_is_logged_and_it_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    facts = Facts()
    async with running(facts) as feed:
        viewer = Viewer(feed)
        await viewer.news()
        with caplog.at_level(logging.ERROR):
            facts.now = {"round": float("nan")}  # is no JSON
            await facts.next_look()
            await facts.next_look()
        assert "cannot be brought up to date" in caplog.text
        facts.now = {"round": 3}
        assert await viewer.news() == {"round": 3}
        await viewer.leave()


async def test_all_streams_end_when_the_feed_is_closed() -> None:
    async with running(Facts()) as feed:
        viewer = Viewer(feed)
        await viewer.news()
        feed.close()
        await viewer.end()
        late = Viewer(feed)
        await late.end()
        assert late.status == 503
