"""The page's listener, in the daemon's own event loop."""

import asyncio
import logging
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import ceil

import uvicorn

from fedring.daemon.config import ConfigError
from fedring.web.app import Source, make_app
from fedring.web.connections import LimitedProtocol
from fedring.web.feed import Feed

log = logging.getLogger(__name__)


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to the daemon."""
        yield


class WebServer:
    """Serves the page at `url` while `run` runs.

    Args:
        source: Where the page's facts come from.
        host: The address or the name on which the page listens.
        port: Its port; 0 = any free one.
        names: Names by which browsers may call it, besides `host`, "localhost" and IP addresses.
    """

    def __init__(self, source: Source, host: str, port: int, *, names: Sequence[str] = ()) -> None:
        self.socket = _bind(host, port)
        name = f"[{host}]" if ":" in host else host
        self.url = f"http://{name}:{self.socket.getsockname()[1]}/"
        self._feed = Feed(source.state)
        self._config = uvicorn.Config(
            make_app(source, self._feed, names=(host, *names)),
            http=LimitedProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
        )
        self._server = _Server(self._config)
        self._ended = asyncio.Event()
        self._ended.set()  # A page that never runs need not be waited for.
        logging.getLogger("uvicorn").setLevel(logging.WARNING)  # the daemon's own log has the rest

    async def run(self) -> None:
        """Serve until `stop` is called."""
        log.info("a page shows what happens: %s", self.url)
        self._ended.clear()
        try:
            async with asyncio.TaskGroup() as tasks:
                looking = tasks.create_task(self._feed.run())
                await self._server.serve(sockets=[self.socket])
                looking.cancel()
        finally:
            self._ended.set()

    async def stop(self, seconds: float) -> None:
        """Stop serving, with `seconds` for requests in progress.

        Streams end at once. If `run` was not called yet, it will end at once, too.
        """
        self._feed.close()
        self._config.timeout_graceful_shutdown = ceil(seconds)
        self._server.should_exit = True
        await self._ended.wait()


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        why = str(error.strerror or error).partition(" (")[0]
        raise ConfigError(f"web_port: cannot listen on {host}:{port}: {why}") from error
