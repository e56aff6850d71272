"""The session: join, watch, beat, and come back for ever."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from math import inf
from typing import Any

from grpc import StatusCode, aio

from fedring.client.errors import Refused
from fedring.client.session.backoff import Backoff
from fedring.client.session.connection import CALL_SECONDS, Connection, is_doubtful, stray_cancellation
from fedring.client.session.inbox import WorkInbox
from fedring.daemon.exits import Exit
from fedring.rpc.errors import (
    FedringError,
    IdInUse,
    Superseded,
    Unavailable,
    UnknownRound,
    reason_of,
    retry_seconds_of,
    status_of,
)
from fedring.rpc.health import Health
from fedring.rpc.streams import TimedStream
from fedring.v1 import federation_pb2 as pb

log = logging.getLogger(__name__)

Lost = aio.AioRpcError | FedringError


class ClientSession:
    """Keeps the client in touch with its server, and fills its inbox."""

    def __init__(self, connection: Connection, health: Health, *, evaluates: bool, tell: Callable[[str], None]) -> None:
        self.inbox = WorkInbox()
        self._connection = connection
        self._health = health  # serves while the session does
        self._evaluates = evaluates
        self._tell = tell  # is told each new state, in one sentence
        self._state = ""
        self._matched = False
        self._in_use_since: float | None = None  # each Join since then was refused, as another session has the id
        self._activity: pb.Activity.ValueType = pb.ACTIVITY_UNSPECIFIED
        self._progress = 0.0
        self._failures: list[pb.Failure] = []
        self._wake = asyncio.Event()
        self._told = asyncio.Condition()
        self._call: Any = None  # the newest Watch stream

    def begin(self, activity: "pb.Activity.ValueType") -> None:
        """From now on heartbeats say that the client does this; may be called from any thread."""
        self._activity, self._progress = activity, 0.0

    def advance(self, share: float) -> None:
        """That share of the activity is done; may be called from any thread."""
        self._progress = share

    async def run(self) -> None:
        """Stay with the server; ends only with Refused."""
        backoff, wait = Backoff(), False
        while True:
            lost: Lost | None
            try:
                with stray_cancellation():
                    session = await self._connection.join(wait=wait)
                    lost = await self._watch(session)
            except (aio.AioRpcError, FedringError) as error:
                lost = error
            if self._matched:
                backoff.reset()
            self._matched = False
            await self._health.set(serving=False)
            wait = lost is not None and _unreachable(lost)
            left = self._seconds_left(lost)
            self._say(*self._explain(lost))
            if lost is not None and is_doubtful(lost):
                await self._connection.reconnect()
            with suppress(Unavailable), stray_cancellation():
                await asyncio.sleep(min(backoff.next(), left))

    async def report_evaluation(self, report: pb.EvaluationReport) -> None:
        """Tell the server the counts, once; it is no failure if the evaluation of that round is over."""
        try:
            with stray_cancellation():
                await self._connection.commands.ReportEvaluation(
                    report, metadata=self._connection.metadata, timeout=CALL_SECONDS
                )
        except (aio.AioRpcError, FedringError) as error:
            level = logging.INFO if status_of(error) is UnknownRound.status else logging.WARNING
            log.log(level, "the evaluation of round %d was not taken: %s", report.round, reason_of(error))
            if is_doubtful(error):
                await self._connection.reconnect()

    async def report_failure(self, failure: pb.Failure) -> None:
        """The server learns with the next message, at once if it can be reached, that this round failed here."""
        if self.inbox.current and self.inbox.current.command.round == failure.round:
            self.inbox.current.failure = failure
        self._failures.append(failure)
        self._wake.set()

    async def flush(self, seconds: float) -> None:
        """Return when the server has read all failures, or it took too long; the stream is at its end then."""
        with suppress(TimeoutError, aio.AioRpcError, asyncio.InvalidStateError):
            async with asyncio.timeout(seconds):
                async with self._told:
                    await self._told.wait_for(lambda: not self._failures)
                if self._call is not None:  # a cancelled stream may lose what was written last
                    await self._call.done_writing()
                    await self._call.code()

    async def _watch(self, session: pb.JoinReply) -> Lost | None:
        """Follow one Watch stream to its end; what ended it, None if the server did without a word."""
        call = self._call = self._connection.commands.Watch(metadata=self._connection.metadata)
        lost: Lost | None = None
        async with asyncio.TaskGroup() as group:
            chores = [group.create_task(self._beat(call, session))]
            try:
                async for event in TimedStream(aiter(call), session.lost_after_seconds):
                    await self._health.set(serving=True)
                    if answer := self._handle(event):
                        chores.append(group.create_task(self.report_evaluation(answer)))
                    if self._connection.stale:
                        break
            except (aio.AioRpcError, FedringError) as error:
                lost = error
            finally:
                call.cancel()
                for chore in chores:
                    chore.cancel()
        if _is(lost, Superseded):
            raise Refused(
                f"another process has joined as {self._connection.client_id!r}, with the same certificate or token, or "
                "a copy of this state_dir: give each client an id and a state_dir of its own",
                Exit.CONFIG,
            )
        return lost

    def _seconds_left(self, lost: Lost | None) -> float:
        """Return for how many seconds to try on: infinity, but while another session has this client's id.

        Raises:
            Refused: if another session has had it for as long as the server says to try.
        """
        if not (isinstance(lost, aio.AioRpcError) and _is(lost, IdInUse)):
            self._in_use_since = None
            return inf
        now = time.monotonic()
        if self._in_use_since is None:
            self._in_use_since = now
        left = self._in_use_since + retry_seconds_of(lost) - now
        if left > 0:
            return left
        raise Refused(
            f"another process has joined fl-server at {self._connection.address} as {self._connection.client_id!r}: "
            "give each client an id of its own (client_id); or, if this client's state_dir was lost, start it again "
            "when that session has ended",
            Exit.CONFIG,
        )

    async def _beat(self, call: Any, session: pb.JoinReply) -> None:
        while True:
            self._wake.clear()
            try:
                async with asyncio.timeout(session.lost_after_seconds):
                    report = self._report()
                    await call.write(report)
                    if report.HasField("failure"):
                        del self._failures[0]
                    async with self._told:
                        self._told.notify_all()
            except (aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
                return  # the reader of the stream learns why
            if not self._failures:
                await self._pause(session.heartbeat_seconds)

    async def _pause(self, seconds: float) -> None:
        """Return when something is to be said, or nothing was said for `seconds`."""
        began = time.monotonic()
        while (left := max(began, self._connection.spoke) + seconds - time.monotonic()) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._wake.wait()
                return

    def _report(self) -> pb.WatchRequest:
        return pb.WatchRequest(
            matched=self._matched,
            activity=self._activity,
            progress=self._progress,
            failure=self._failures[0] if self._failures else None,
        )

    def _handle(self, event: pb.ServerEvent) -> pb.EvaluationReport | None:
        """Act on the event; the report to answer it with, if it is answered at once."""
        match event.WhichOneof("event"):
            case "heartbeat" if not self._matched:
                self._matched = True
                self._wake.set()
                self._say("watching", f"in session with fl-server at {self._connection.address}")
            case "train":
                assignment = self.inbox.train(event.train, self._connection.last_accepted)
                if assignment.failure:  # the server forgot: it has been restarted
                    self._failures.append(assignment.failure)
                    self._wake.set()
            case "evaluate" if self._evaluates:
                self.inbox.evaluate(event.evaluate)
            case "evaluate":
                order = event.evaluate
                return pb.EvaluationReport(round=order.round, model_digest=order.model_digest)
            case "round_ended":
                self.inbox.end(event.round_ended.round, event.round_ended.reason)
        return None

    def _explain(self, lost: Lost | None) -> tuple[str, str]:
        """A state and its sentence."""
        address = self._connection.address
        if lost is None or isinstance(lost, Unavailable):
            return "closed", f"fl-server at {address} closed the session; joining again"
        if isinstance(lost, FedringError):
            return "silent", f"fl-server at {address} is silent ({lost}); joining again"
        if _unreachable(lost):
            return "unreachable", f"cannot reach fl-server at {address}, trying on: {lost.details()}"
        if _is(lost, IdInUse):
            name, seconds = self._connection.client_id, retry_seconds_of(lost)
            return "in_use", f"fl-server at {address} has another session of {name!r}, trying on for {seconds:g} s"
        if status_of(lost) is StatusCode.UNIMPLEMENTED:
            return "no_server", f"what listens at {address} is no fl-server: check `server`; trying on"
        return status_of(lost).name, f"fl-server at {address} answered {reason_of(lost)}; trying on: {lost.details()}"

    def _say(self, state: str, sentence: str) -> None:
        """Log and tell each change once, not each attempt."""
        if state != self._state:
            self._state = state
            log.log(logging.INFO if state == "watching" else logging.WARNING, "%s", sentence, extra={"state": state})
            self._tell(sentence)


def _is(lost: Lost | None, kind: type[FedringError]) -> bool:
    return isinstance(lost, aio.AioRpcError) and reason_of(lost) == kind.reason


def _unreachable(lost: Lost) -> bool:
    return isinstance(lost, aio.AioRpcError) and status_of(lost) in (
        StatusCode.UNAVAILABLE,
        StatusCode.DEADLINE_EXCEEDED,
    )
