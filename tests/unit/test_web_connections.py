"""Connections to the page: half-sent requests end, streams last, and no address takes the room of the others."""

import asyncio
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from fedring.web import connections
from fedring.web.connections import MOST_CONNECTIONS, MOST_FROM_LOOPBACK, MOST_PER_ADDRESS, LimitedProtocol
from fedring.web.serve import WebServer

SECONDS = 60.0
HALF = b"GET / HTTP/1.1\r\nHo"
HEALTH = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
STREAM = b"GET /api/stream HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Facts:
    """A source of the page that knows one number."""

    def __init__(self) -> None:
        self.now = 1

    async def state(self) -> Mapping[str, Any]:
        return {"number": self.now}

    async def rounds(self, job_id: int, after: int) -> Mapping[str, Any]:
        return {}

    async def events(self, after: int) -> Mapping[str, Any]:
        return {}


@pytest.fixture
def facts() -> Facts:
    return Facts()


@pytest.fixture
async def page(facts: Facts) -> AsyncIterator[WebServer]:
    """A page that runs in this event loop."""
    page = WebServer(facts, "127.0.0.1", 0, local=True)
    with page.socket:
        run = asyncio.create_task(page.run())
        yield page
        await page.stop(0)
        await run


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LimitedProtocol, "head_seconds", 0.1)


@asynccontextmanager
async def dial(page: WebServer, source: str = "127.0.0.1") -> AsyncIterator[tuple[StreamReader, StreamWriter]]:
    """A connection to the page from the address `source`."""
    address = page.socket.getsockname()
    async with asyncio.timeout(SECONDS):
        reader, writer = await asyncio.open_connection(*address, local_addr=(source, 0))
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def closed(reader: StreamReader) -> None:
    """Return when the page has closed the connection, to which it must not have sent anything more."""
    async with asyncio.timeout(SECONDS):
        with suppress(ConnectionError):
            assert await reader.read() == b""


async def healthy(line: tuple[StreamReader, StreamWriter]) -> bool:
    """Ask for the page's health over this connection, and return whether it answered."""
    line[1].write(HEALTH)
    async with asyncio.timeout(SECONDS):
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            return b" 200 " in await line[0].readuntil(b"\r\n\r\nok\n")
    return False


@pytest.mark.usefixtures("_impatient")
class TestDeadline:
    @pytest.mark.parametrize("sent", [b"", HALF])
    async def test_a_connection_without_a_whole_request_is_closed(self, page: WebServer, sent: bytes) -> None:
        async with dial(page) as (reader, writer):
            writer.write(sent)
            await closed(reader)

    async def test_single_bytes_put_nothing_off(self, page: WebServer) -> None:
        async with dial(page) as (reader, writer):
            writer.write(HALF)
            end = asyncio.create_task(closed(reader))
            while not (await asyncio.wait([end], timeout=0.01))[0]:
                writer.write(b"o")
            await end

    @pytest.mark.parametrize("sent", [b"", HALF])
    async def test_the_next_request_has_a_deadline_too(self, page: WebServer, sent: bytes) -> None:
        async with dial(page) as line:
            assert await healthy(line)
            line[1].write(sent)
            await closed(line[0])

    async def test_a_body_that_never_comes_keeps_no_connection_open(self, page: WebServer) -> None:
        async with dial(page) as (reader, writer):
            writer.write(HEALTH.replace(b"\r\n\r\n", b"\r\nContent-Length: 9\r\n\r\n"))
            async with asyncio.timeout(SECONDS):
                await reader.readuntil(b"\r\n\r\nok\n")
            await closed(reader)

    async def test_a_stream_outlives_it(self, page: WebServer, facts: Facts) -> None:
        async with dial(page) as (stream, writer), asyncio.timeout(SECONDS):
            writer.write(STREAM)
            await stream.readuntil(b'data: {"number":1}')
            async with dial(page) as (later, _):
                await closed(later)  # so the deadline of the stream's request has passed before
            facts.now = 2
            await stream.readuntil(b'data: {"number":2}')

    async def test_hundreds_of_half_sent_requests_are_all_closed(self, page: WebServer) -> None:
        async with AsyncExitStack() as stack:
            lines = [await stack.enter_async_context(dial(page)) for _ in range(2 * MOST_CONNECTIONS)]
            for _, writer in lines:
                writer.write(HALF)
            await asyncio.gather(*(closed(reader) for reader, _ in lines))
            assert await healthy(await stack.enter_async_context(dial(page)))


class TestRoom:
    async def test_an_address_has_so_many_connections_and_others_have_theirs(
        self, page: WebServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(connections, "MOST_FROM_LOOPBACK", 3)
        async with AsyncExitStack() as stack:
            lines = [await stack.enter_async_context(dial(page)) for _ in range(3)]
            assert all([await healthy(line) for line in lines])
            async with dial(page) as (reader, _):
                await closed(reader)
            assert await healthy(await stack.enter_async_context(dial(page, "127.0.0.2")))
            assert all([await healthy(line) for line in lines])

    async def test_who_leaves_makes_room(self, page: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(connections, "MOST_FROM_LOOPBACK", 1)
        async with dial(page) as line:
            assert await healthy(line)
        served = False
        async with asyncio.timeout(SECONDS):
            while not served:  # the page may not have seen yet that the first one has left
                async with dial(page) as line:
                    served = await healthy(line)

    async def test_each_kind_of_address_has_its_limit(self) -> None:
        for address, most in [("203.0.113.1", MOST_PER_ADDRESS), ("127.0.0.1", MOST_FROM_LOOPBACK)]:
            door = Door()
            assert all(door.admits(address) for _ in range(most))
            assert not door.admits(address)
            assert all(door.admits("203.0.113.2") for _ in range(MOST_PER_ADDRESS))

    async def test_addresses_that_one_host_can_choose_are_one(self) -> None:
        door = Door()
        assert all(door.admits(f"2001:db8::{i:x}") for i in range(MOST_PER_ADDRESS))
        assert not door.admits("2001:db8::ffff:1")
        assert door.admits("2001:db8:0:1::1")
        assert door.admits("fe80::1%eth0")

    async def test_all_addresses_together_have_a_limit(self) -> None:
        door = Door()
        assert [door.admits(f"203.0.113.{i}") for i in range(MOST_CONNECTIONS + 1)].index(False) == MOST_CONNECTIONS


class Line(asyncio.Transport):
    """The server's end of a connection from an address that this host does not have."""

    aborted = False

    def __init__(self, address: str) -> None:
        super().__init__({"peername": (address, 50_000)})

    def abort(self) -> None:
        self.aborted = True


class Door:
    """What the connections of one listener share; it is asked within an event loop."""

    def __init__(self) -> None:
        self._config = uvicorn.Config(WebServer, http=LimitedProtocol, log_config=None)
        self._state = ServerState()

    def admits(self, address: str) -> bool:
        """Return whether one more connection from this address stays open."""
        line = Line(address)
        LimitedProtocol(self._config, self._state, {}).connection_made(line)
        return not line.aborted
