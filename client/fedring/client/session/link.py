"""The thread that talks to servers, and the calls of the user's threads into it."""

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Callable, Coroutine
from functools import cache
from typing import Any, TypeVar

from grpc import aio

from fedring.client.config import ClientConfig
from fedring.client.errors import Closed, RoundOver
from fedring.client.metrics import Metrics
from fedring.client.session.connection import Connection
from fedring.client.session.watch import Session
from fedring.daemon.notify import watchdog
from fedring.rpc.health import Health, health_port

log = logging.getLogger(__name__)

T = TypeVar("T")
_CLOSE_SECONDS = 5.0
_making = threading.Lock()


class Link:
    """One session with its channel; all that is asynchronous belongs to the process' one event loop."""

    connection: Connection
    session: Session

    def __init__(self, config: ClientConfig, metrics: Metrics, *, evaluates: bool, tell: Callable[[str], None]) -> None:
        self._config = config
        self.metrics = metrics
        self._evaluates = evaluates
        self._tell = tell
        self._loop = _session_loop()
        self._main: asyncio.Task[None] | None = None
        self._gate = threading.Lock()
        self._open = True  # calls are taken; changed within the gate only
        self._calls: set[concurrent.futures.Future[Any]] = set()
        started = threading.Event()
        self._end = asyncio.run_coroutine_threadsafe(self._serve(started), self._loop)
        started.wait()
        if not hasattr(self, "session"):
            raise self._end.exception() or Closed

    def call(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What `work` returns in the session's thread; Closed if `close` ended that first, else what did: Refused."""
        with self._gate:
            future = asyncio.run_coroutine_threadsafe(work(), self._loop) if self._open else None
            if future:
                self._calls.add(future)
        try:
            if future:
                return future.result()
        except concurrent.futures.CancelledError:
            pass
        finally:
            with self._gate:
                self._calls -= {future}
        if self._open:  # nobody asked for that cancellation
            raise RoundOver("interrupted", "the session lost a call")
        try:
            error = self._end.exception()  # it is ending, and then says why
        except concurrent.futures.CancelledError:
            error = None
        raise error or Closed

    def close(self) -> None:
        """Begin to end the session; may be called from a signal handler."""
        self._loop.call_soon_threadsafe(self._cancel)

    def join(self) -> None:
        """Return when the session has ended, within a few seconds."""
        concurrent.futures.wait([self._end], _CLOSE_SECONDS)

    def _cancel(self) -> None:
        self.session.inbox.end_all("closed")
        if self._main and not self._main.cancelling():
            self._main.cancel()

    async def _serve(self, started: threading.Event) -> None:
        """Run the session; ends with Refused, a fault of ours, or a cancellation."""
        try:
            self.connection = Connection(self._config, self.metrics)
            health = Health(reflection=self._config.reflection)
            port = await self._answer_health_checks(health)
            self.session = Session(self.connection, health, evaluates=self._evaluates, tell=self._tell)
            self._main = asyncio.current_task()
        finally:
            started.set()
        beat = asyncio.create_task(watchdog())
        try:
            await self.session.run()
        finally:
            with self._gate:
                self._open = False
                calls = list(self._calls)
            for call in calls:
                call.cancel()
            beat.cancel()
            await health.stop()
            self.session.inbox.end_all("closed")
            await self.connection.close()
            if port:
                await port.stop(None)

    async def _answer_health_checks(self, health: Health) -> aio.Server | None:
        """The server that answers them, if there is to be one."""
        if not self._config.health_listen:
            return None
        server, address = health_port(self._config.health_listen, health)
        await health.set(serving=False)
        await server.start()
        log.info("answers health checks at %s", address, extra={"health": address})
        return server


def _session_loop() -> asyncio.AbstractEventLoop:
    """The event loop of all sessions of this process: of several, grpc.aio would wake every one for each event."""
    with _making:
        return _made_loop()


@cache
def _made_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="fedring-session", daemon=True).start()
    return loop
