"""The tries of one call, with the waits between them."""

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from grpc import aio

from fedring.client.session.connection import Connection, stray_cancellation
from fedring.client.session.retry import NextStep, RetryPolicy, Verdict
from fedring.rpc.errors import FedringError, Unavailable, reason_of, status_of

_LOOK_SECONDS = 1.0  # between looks at whether the call is still wanted, while there is no session


class Tries:
    """One call, tried until it succeeds or its policy gives up.

    Use it on the event loop of the connection:

        tries = Tries(connection, policy)
        while True:
            try:
                with tries.one():
                    return await call()
            except (aio.AioRpcError, FedringError) as error:
                if tries.judge(error) is Verdict.DROP:
                    raise
            await tries.wait()

    Args:
        connection: Over which the call is made.
        policy: Says which failures are worth another try.
    """

    def __init__(self, connection: Connection, policy: RetryPolicy) -> None:
        self._connection, self._policy = connection, policy
        self._failures = self._damages = 0
        self._session_id = ""
        self._next = NextStep(Verdict.LATER, 0.0, False)

    @contextmanager
    def one(self) -> Iterator[None]:
        """Make one try in this context, in the current session."""
        self._session_id = self._connection.session.session_id
        with stray_cancellation():
            yield

    def judge(self, error: aio.AioRpcError | FedringError) -> Verdict:
        """Return the verdict on a failed try.

        Unless it is DROP, `wait` comes next.
        """
        status, reason = status_of(error), reason_of(error)
        self._next = self._policy.after(status, reason, failures=self._failures, damages=self._damages)
        self._failures += 1
        self._damages += self._next.verdict is Verdict.AGAIN
        return self._next.verdict

    def reset(self) -> None:
        """Forget the failures so far, because a try has come far enough."""
        self._failures = self._damages = 0

    async def wait(self, *, deadline: float | None = None, look: Callable[[], None] = lambda: None) -> None:
        """Wait until it is time for the next try.

        Before it, this opens a new connection, or waits for a new session, if the try needs one.

        Args:
            deadline: Until when to wait at most, in monotonic seconds; None = as long as it takes.
            look: Is called before, and every second without a session; may raise if the call is not wanted any more.

        Raises:
            TimeoutError: If the deadline has passed.
        """
        if self._next.reconnect:
            await self._connection.reconnect()
        look()
        with suppress(Unavailable), stray_cancellation():
            async with asyncio.timeout(None if deadline is None else deadline - time.monotonic()):
                if self._next.verdict is Verdict.JOIN:
                    await self._wait_for_new_session(look)
                await asyncio.sleep(random.uniform(0, self._next.most_seconds))

    async def _wait_for_new_session(self, look: Callable[[], None]) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_SECONDS):
                    return await self._connection.wait_for_new_session(self._session_id)
            look()
