"""A worker's rendezvous with its group.

It is a stream to the server, for one round.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from grpc import aio

from fedring.client.errors import FederationClosed
from fedring.client.session.link import ServerLink
from fedring.client.session.retry import RetryPolicy, Verdict
from fedring.client.session.tries import Tries
from fedring.rpc.errors import FedringError, Unavailable, reason_of
from fedring.v1 import federation_pb2
from fedring.v1 import rendezvous_pb2 as pb

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.2  # between checks of whether the round is over
_TOO_LATE = "too_late"  # for this group: as a new worker it may still get into another


class RendezvousStream:
    """The server's newest message to a worker, and a way to answer.

    The user's thread uses it, within `with`. A stream that is lost is opened again. The server then treats this client
    as a new worker.

    Args:
        link: The session to the server.
        command: Names the round.
    """

    def __init__(self, link: ServerLink, command: federation_pb2.TrainCmd) -> None:
        self._link = link
        self._enter = pb.Enter(run_id=command.run_id, round=command.round)
        self._news = threading.Condition()
        self._newest = pb.GroupMessage()  # empty while there is no stream
        self._call: Any = None
        self._task: asyncio.Task[None] | None = None
        self.on_news: Callable[[pb.GroupMessage], None] = lambda news: None
        """Called with each message when it is received, on the session's thread; it must not block."""

    def __enter__(self) -> Self:
        self._link.call(self._start)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with suppress(FederationClosed):  # If so, the stream has ended with the connection.
            self._link.call(self._stop)

    @property
    def newest(self) -> pb.GroupMessage:
        """The newest message of the server; empty while there is no stream."""
        return self._newest

    def wait(self, wanted: Callable[[pb.GroupMessage], bool], look: Callable[[], None]) -> pb.GroupMessage:
        """Wait until the newest message is a wanted one, and return it.

        Args:
            wanted: Says whether a message is wanted; may raise.
            look: Is called several times a second while waiting; may raise.
        """
        while True:
            look()
            with self._news:
                if self._news.wait_for(lambda: wanted(self._newest), _LOOK_SECONDS):
                    return self._newest

    def tell(self, message: pb.WorkerMessage) -> None:
        """Send a message to the server.

        It is dropped while there is no stream: the server asks again later.
        """
        self._link.call(lambda: self._tell(message))

    async def _start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def _stop(self) -> None:
        if self._task:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        """Follow one stream after the other until the server ends the rendezvous."""
        tries = Tries(self._link.connection, RetryPolicy())
        while self._newest.WhichOneof("message") != "ended":
            try:
                with tries.one():
                    await self._follow(tries)
            except aio.UsageError:  # The channel was closed.
                return
            except (aio.AioRpcError, FedringError) as error:
                if tries.judge(error) is Verdict.DROP:
                    self._take(pb.GroupMessage(ended=pb.Ended(reason=reason_of(error))))
                    return
                if reason_of(error) != _TOO_LATE:
                    log.warning("the rendezvous of round %d is interrupted: %s", self._enter.round, reason_of(error))
                self._take(pb.GroupMessage())
                await tries.wait()

    async def _follow(self, tries: Tries) -> None:
        """Follow one stream until the server ends the rendezvous.

        Raises:
            Unavailable: If the stream ended before, or this worker came too late.
            AioRpcError: If the call failed.
        """
        connection = self._link.connection
        call = connection.rendezvous.Form(metadata=connection.metadata)
        try:
            await _write(call, pb.WorkerMessage(enter=self._enter))
            # Only now: Enter must come first, and gRPC breaks a call that is given two messages at the same time.
            self._call = call
            async for message in call:
                tries.reset()
                if message.WhichOneof("message") == "prepare":
                    self._enter.generation = max(self._enter.generation, message.prepare.generation)
                if message.WhichOneof("message") == "ended" and message.ended.reason == _TOO_LATE:
                    raise Unavailable(reason=_TOO_LATE)
                self._take(message)
            if self._newest.WhichOneof("message") != "ended":
                raise Unavailable("the server closed the rendezvous")
        finally:
            self._call = None
            call.cancel()

    def _take(self, message: pb.GroupMessage) -> None:
        with self._news:
            self._newest = message
            self._news.notify_all()
        self.on_news(message)

    async def _tell(self, message: pb.WorkerMessage) -> None:
        if self._call is not None:
            await _write(self._call, message)


async def _write(call: Any, message: pb.WorkerMessage) -> None:
    with suppress(asyncio.InvalidStateError):  # Whoever reads the stream learns why.
        await call.write(message)
