"""Connections to the page: incomplete requests time out, streams stay, and no address takes all connections."""

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
    """The facts of a page that shows one number."""

    def __init__(self) -> None:
        self.now = 1

    async def state(self) -> Mapping[str, Any]:
        return {"number": self.now}

    async def rounds(self, job_id: int, after: int, *, clients: bool = False) -> Mapping[str, Any]:
        return {}

    async def clients(self, search: str, skip: int) -> Mapping[str, Any]:
        return {}

    async def events(self, after: int) -> Mapping[str, Any]:
        return {}


@pytest.fixture
def facts() -> Facts:
    return Facts()


@pytest.fixture
async def page(facts: Facts) -> AsyncIterator[WebServer]:
    """Yield a page that runs in this event loop."""
    page = WebServer(facts, "127.0.0.1", 0)
    with page.socket:
        run = asyncio.create_task(page.run())
        yield page
        await page.stop(0)
        await run


async def test_a_page_that_has_not_begun_can_be_stopped(facts: Facts) -> None:
    page = WebServer(facts, "127.0.0.1", 0)
    with page.socket:
        async with asyncio.timeout(SECONDS):
            await page.stop(0)
            await page.run()


@pytest.fixture
def _short_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LimitedProtocol, "head_seconds", 0.1)


@asynccontextmanager
async def dial(page: WebServer, source: str = "127.0.0.1") -> AsyncIterator[tuple[StreamReader, StreamWriter]]:
    """Open a connection to the page from the address `source`."""
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
    """Return when the page has closed the connection. Until then, it must not send anything."""
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


@pytest.mark.usefixtures("_short_deadline")
class TestDeadline:
    @pytest.mark.parametrize("sent", [b"", HALF])
    async def test_a_connection_without_a_whole_request_is_closed(self, page: WebServer, sent: bytes) -> None:
        async with dial(page) as (reader, writer):
            writer.write(sent)
            await closed(reader)

    async def test_single_bytes_do_not_extend_the_deadline(self, page: WebServer) -> None:
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

    async def test_a_connection_whose_body_never_arrives_is_closed(self, page: WebServer) -> None:
        async with dial(page) as (reader, writer):
            writer.write(HEALTH.replace(b"\r\n\r\n", b"\r\nContent-Length: 9\r\n\r\n"))
            async with asyncio.timeout(SECONDS):
                await reader.readuntil(b"\r\n\r\nok\n")
            await closed(reader)

    async def test_a_stream_outlives_the_deadline(self, page: WebServer, facts: Facts) -> None:
        async with dial(page) as (stream, writer), asyncio.timeout(SECONDS):
            writer.write(STREAM)
            await stream.readuntil(b'data: {"number":1}')
            async with dial(page) as (later, _):
                await closed(later)  # so the earlier deadline of the stream's request has passed, too
            facts.now = 2
            await stream.readuntil(b'data: {"number":2}')

    async def test_hundreds_of_half_sent_requests_are_all_closed(self, page: WebServer) -> None:
        async with AsyncExitStack() as stack:
            lines = [await stack.enter_async_context(dial(page)) for _ in range(2 * MOST_CONNECTIONS)]
            for _, writer in lines:
                writer.write(HALF)
            await asyncio.gather(*(closed(reader) for reader, _ in lines))
            assert await healthy(await stack.enter_async_context(dial(page)))


class TestLimits:
    async def test_each_address_has_its_own_limit_of_connections(
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

    async def test_a_closed_connection_makes_room_for_another(
        self, page: WebServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(connections, "MOST_FROM_LOOPBACK", 1)
        async with dial(page) as line:
            assert await healthy(line)
        served = False
        async with asyncio.timeout(SECONDS):
            while not served:  # the page may not have noticed yet that the first connection is closed
                async with dial(page) as line:
                    served = await healthy(line)

    async def test_each_kind_of_address_has_its_limit(self) -> None:
        for address, most in [("203.0.113.1", MOST_PER_ADDRESS), ("127.0.0.1", MOST_FROM_LOOPBACK)]:
            listener = Listener()
            assert all(listener.admits(address) for _ in range(most))
            assert not listener.admits(address)
            assert all(listener.admits("203.0.113.2") for _ in range(MOST_PER_ADDRESS))

    async def test_ipv6_addresses_from_which_one_host_can_choose_count_as_one(self) -> None:
        listener = Listener()
        assert all(listener.admits(f"2001:db8::{i:x}") for i in range(MOST_PER_ADDRESS))
        assert not listener.admits("2001:db8::ffff:1")
        assert listener.admits("2001:db8:0:1::1")
        assert listener.admits("fe80::1%eth0")

    async def test_all_addresses_together_have_a_limit(self) -> None:
        listener = Listener()
        assert [listener.admits(f"203.0.113.{i}") for i in range(MOST_CONNECTIONS + 1)].index(False) == MOST_CONNECTIONS


class FakeTransport(asyncio.Transport):
    """The server's end of a connection from an address that this host does not have."""

    aborted = False

    def __init__(self, address: str) -> None:
        super().__init__({"peername": (address, 50_000)})

    def abort(self) -> None:
        self.aborted = True


class Listener:
    """The state that the connections of one listener share. It needs a running event loop."""

    def __init__(self) -> None:
        self._config = uvicorn.Config(WebServer, http=LimitedProtocol, log_config=None)
        self._state = ServerState()

    def admits(self, address: str) -> bool:
        """Return whether one more connection from this address stays open."""
        transport = FakeTransport(address)
        LimitedProtocol(self._config, self._state, {}).connection_made(transport)
        return not transport.aborted
