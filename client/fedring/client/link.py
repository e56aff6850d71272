"""The thread that talks to the server, and the calls of the user's thread into it."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from fedring.client.config import ClientConfig
from fedring.client.connection import Connection
from fedring.client.errors import Closed
from fedring.client.models import Models
from fedring.client.session import Session
from fedring.daemon.notify import watchdog

T = TypeVar("T")
_CLOSE_SECONDS = 5.0


class Link:
    """One event loop with one channel; all that is asynchronous belongs to it."""

    connection: Connection
    session: Session
    models: Models

    def __init__(self, config: ClientConfig, *, evaluates: bool, tell: Callable[[str], None]) -> None:
        self._config = config
        self._evaluates = evaluates
        self._tell = tell
        self._loop = asyncio.new_event_loop()
        self._ended_by: Exception | None = None  # None = `close`
        self._main: asyncio.Task[None] | None = None
        self._gate = threading.Lock()
        self._open = True  # calls are taken; changed within the gate only
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), name="fedring-session", daemon=True)
        self._thread.start()
        started.wait()

    def call(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What `work` returns in the session's thread; Closed if `close` ended that first, else what did: Refused."""
        with self._gate:
            future = asyncio.run_coroutine_threadsafe(work(), self._loop) if self._open else None
        try:
            if future:
                return future.result()
        except concurrent.futures.CancelledError:
            pass
        self._thread.join()  # it is ending, and then says why
        raise self._ended_by or Closed

    def close(self) -> None:
        """Begin to end the session; may be called from a signal handler."""
        with suppress(RuntimeError):  # the loop has ended already
            self._loop.call_soon_threadsafe(self._cancel)

    def join(self) -> None:
        """Return when the session's thread has ended, within a few seconds."""
        self._thread.join(_CLOSE_SECONDS)

    def _cancel(self) -> None:
        self.session.inbox.end_all("closed")
        if self._main and not self._main.cancelling():
            self._main.cancel()

    def _run(self, started: threading.Event) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            try:
                runner.run(self._serve(started))
            except asyncio.CancelledError:
                pass
            except Exception as error:  # noqa: BLE001  # Refused, or a fault of ours: the user's thread raises it
                self._ended_by = error
            finally:
                started.set()

    async def _serve(self, started: threading.Event) -> None:
        self.connection = Connection(self._config.server, self._config.client_id)
        self.session = Session(self.connection, evaluates=self._evaluates, tell=self._tell)
        self.models = Models(self.connection, self.session.advance)
        self._main = asyncio.current_task()
        started.set()
        beat = asyncio.create_task(watchdog())
        try:
            await self.session.run()
        finally:
            with self._gate:
                self._open = False
            await asyncio.sleep(0)  # what came through the gate becomes a task, which the runner then cancels
            beat.cancel()
            self.session.inbox.end_all("closed")
            await self.connection.close()
