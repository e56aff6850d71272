"""A worker's stream to the server for one round: what the server said last, and what it is told."""

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from grpc import StatusCode, aio

from fedring.client.errors import FederationClosed
from fedring.client.session.backoff import Backoff
from fedring.client.session.connection import stray_cancellation
from fedring.client.session.link import ServerLink
from fedring.rpc.errors import FedringError, Unavailable, UnknownRound, reason_of, status_of
from fedring.v1 import federation_pb2
from fedring.v1 import rendezvous_pb2 as pb

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.2  # between looks at whether the round is over
_FINAL = {StatusCode.INVALID_ARGUMENT, StatusCode.PERMISSION_DENIED, StatusCode.UNIMPLEMENTED}


class RendezvousStream:
    """Open within `with`; a stream that is lost comes back by itself, and the server then takes it for a new worker."""

    def __init__(self, link: ServerLink, command: federation_pb2.TrainCmd) -> None:
        self._link = link
        self._enter = pb.Enter(run_id=command.run_id, round=command.round)
        self._news = threading.Condition()
        self._newest = pb.GroupMessage()  # without a content while the stream is down
        self._call: Any = None
        self._task: asyncio.Task[None] | None = None
        self.on_news: Callable[[pb.GroupMessage], None] = lambda news: None
        """Is called with each message as it comes, on the session's thread; must not wait."""

    def __enter__(self) -> Self:
        self._link.call(self._start)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with suppress(FederationClosed):  # then the channel is closed, too, and the stream has ended with it
            self._link.call(self._stop)

    @property
    def newest(self) -> pb.GroupMessage:
        """What the server said last."""
        return self._newest

    def wait(self, wanted: Callable[[pb.GroupMessage], bool], look: Callable[[], None]) -> pb.GroupMessage:
        """The first newest message that is wanted; meanwhile `look` is called now and then, and may raise."""
        while True:
            look()
            with self._news:
                if self._news.wait_for(lambda: wanted(self._newest), _LOOK_SECONDS):
                    return self._newest

    def tell(self, message: pb.WorkerMessage) -> None:
        """The server is told, if the stream is there; if not, it will ask anew."""
        self._link.call(lambda: self._write(message))

    async def _start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def _stop(self) -> None:
        if self._task:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        """Follow one stream after the other until the server has nothing more to say."""
        backoff = Backoff()
        while self._newest.WhichOneof("message") != "ended":
            session_id = self._link.connection.session.session_id
            try:
                with stray_cancellation():
                    await self._follow(backoff)
            except aio.UsageError:  # the channel is closed
                return
            except (aio.AioRpcError, FedringError) as error:
                await self._judge(error, session_id)
            await asyncio.sleep(backoff.next())

    async def _judge(self, error: aio.AioRpcError | FedringError, session_id: str) -> None:
        """After a lost stream: note that the round is over, or wait until another try makes sense."""
        status = error.status if isinstance(error, FedringError) else status_of(error)
        reason = error.reason if isinstance(error, FedringError) else reason_of(error)
        if reason == UnknownRound.reason or status in _FINAL:
            self._take(pb.GroupMessage(ended=pb.Ended(reason=reason)))
            return
        log.warning("the rendezvous of round %d is interrupted: %s", self._enter.round, reason)
        self._take(pb.GroupMessage())
        if status in (StatusCode.UNAUTHENTICATED, StatusCode.ABORTED):
            with suppress(TimeoutError):
                async with asyncio.timeout(5):
                    await self._link.connection.wait_for_new_session(session_id)

    async def _follow(self, backoff: Backoff) -> None:
        """Take what comes on one stream, to its end."""
        connection = self._link.connection
        call = self._call = connection.rendezvous.Form(metadata=connection.metadata)
        try:
            await self._write(pb.WorkerMessage(enter=self._enter))
            async for message in call:
                backoff.reset()
                if message.WhichOneof("message") == "prepare":
                    self._enter.generation = max(self._enter.generation, message.prepare.generation)
                if message.WhichOneof("message") == "ended" and message.ended.reason == "too_late":
                    self._take(pb.GroupMessage())
                    return  # as a new worker it may have another chance
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

    async def _write(self, message: pb.WorkerMessage) -> None:
        if self._call is not None:
            with suppress(aio.AioRpcError, asyncio.InvalidStateError):  # who reads the stream learns why
                await self._call.write(message)
