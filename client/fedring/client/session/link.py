"""The thread of the sessions, and calls into it from other threads."""

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Callable, Coroutine
from functools import cache
from typing import Any, TypeVar

from grpc import aio

from fedring.client.config import ClientConfig
from fedring.client.errors import FederationClosed, RoundOver
from fedring.client.metrics import ClientMetrics
from fedring.client.session.connection import Connection
from fedring.client.session.watch import ClientSession
from fedring.daemon.notify import watchdog
from fedring.daemon.signals import result_of
from fedring.rpc.health import Health, health_port

log = logging.getLogger(__name__)

T = TypeVar("T")
_CLOSE_SECONDS = 5.0
_loop_lock = threading.Lock()


class ServerLink:
    """One session with its connection, on an event loop thread.

    The process has one such thread for all sessions. Any thread may use it. `connection` and `session` belong to the
    event loop: use them inside of `call`, except for those of their methods and attributes that say that any thread may
    use them.

    Args:
        config: The client's configuration.
        metrics: Where calls and reconnects are counted.
        evaluates: Whether the client evaluates published models.
        tell: Is called with a sentence for people whenever the state of the session changes, on the session's thread.

    Raises:
        ConfigError: If a certificate or `health_listen` cannot be used.
    """

    connection: Connection
    session: ClientSession

    def __init__(
        self, config: ClientConfig, metrics: ClientMetrics, *, evaluates: bool, tell: Callable[[str], None]
    ) -> None:
        self._config = config
        self.metrics = metrics
        self._evaluates = evaluates
        self._tell = tell
        self._loop = _session_loop()
        self._main: asyncio.Task[None] | None = None
        self._lock = threading.Lock()
        self._open = True  # calls are accepted; only changed while the lock is held
        self._calls: set[concurrent.futures.Future[Any]] = set()
        started = threading.Event()
        self._end = asyncio.run_coroutine_threadsafe(self._serve(started), self._loop)
        started.wait()
        if not hasattr(self, "session"):
            raise self._end.exception() or FederationClosed

    def call(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine on the session's thread and wait for its result.

        Args:
            work: Makes the coroutine; called on the calling thread.

        Returns:
            What the coroutine returns.

        Raises:
            FederationClosed: If `close` ended the session before the coroutine was done.
            Refused: If the server has refused this client for good.
            RoundOver: With the reason "interrupted", if the coroutine was cancelled although the session goes on.
        """
        with self._lock:
            future = asyncio.run_coroutine_threadsafe(work(), self._loop) if self._open else None
            if future:
                self._calls.add(future)
        try:
            if future:
                return result_of(future)
        except concurrent.futures.CancelledError:
            pass
        finally:
            with self._lock:
                self._calls -= {future}
        if self._open:  # Nobody asked for this cancellation.
            raise RoundOver("interrupted", "a call was cancelled while the session went on")
        try:
            error = self._end.exception()  # The session is ending: wait until it tells why.
        except concurrent.futures.CancelledError:
            error = None
        raise error or FederationClosed

    def start(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a coroutine on the session's thread, without waiting.

        It runs until it ends or the session does.
        """
        with self._lock:
            if self._open:
                self._calls.add(asyncio.run_coroutine_threadsafe(work(), self._loop))

    def close(self) -> None:
        """Begin to end the session, without waiting.

        A signal handler may call this.
        """
        self._loop.call_soon_threadsafe(self._cancel)

    def join(self) -> None:
        """Wait until the session has ended, for 5 seconds at most."""
        concurrent.futures.wait([self._end], _CLOSE_SECONDS)

    def _cancel(self) -> None:
        self.session.inbox.end_all("closed")
        if self._main and not self._main.cancelling():
            self._main.cancel()

    async def _serve(self, started: threading.Event) -> None:
        """Run the session until it is refused or cancelled."""
        try:
            self.connection = Connection(self._config, self.metrics)
            health = Health()
            port = await self._answer_health_checks(health)
            self.session = ClientSession(self.connection, health, evaluates=self._evaluates, tell=self._tell)
            self._main = asyncio.current_task()
        finally:
            # Set after an error, too: the constructor waits for this, and raises if there is no session.
            started.set()
        beat = asyncio.create_task(watchdog())
        try:
            await self.session.run()
        finally:
            # Under the lock, so that no thread adds a call after the last one was cancelled.
            with self._lock:
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
        """Start the server at `health_listen`, if that is set, and return it."""
        if not self._config.health_listen:
            return None
        server, address = health_port(self._config.health_listen, health)
        await health.set(serving=False)
        await server.start()
        log.info("answering health checks at %s", address, extra={"health": address})
        return server


def _session_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all sessions.

    With several loops, grpc.aio would wake each of them for every event.
    """
    with _loop_lock:
        return _make_loop()


@cache
def _make_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="fedring-session", daemon=True).start()
    return loop
