"""The session: join, watch, send heartbeats, and join again after losses."""

import asyncio
import logging
import random
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from grpc import StatusCode, aio

from fedring.client.errors import Refused
from fedring.client.session.connection import CALL_SECONDS, Connection, stray_cancellation
from fedring.client.session.inbox import WorkInbox
from fedring.client.session.losses import Lost, explain, is_a, is_unreachable
from fedring.client.session.retry import RetryPolicy, Verdict, is_doubtful
from fedring.client.session.tries import Tries
from fedring.daemon.exits import Exit
from fedring.rpc.errors import (
    MOST_AWAY,
    ComeBack,
    FedringError,
    IdInUse,
    InLine,
    OldTerm,
    Standby,
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

_OF_SESSIONS = (None, "heartbeat", "evaluate")
"""The events that concern no round of training; None is one that this program does not know."""

_MOST_EVENTS = 64
"""How many events of rounds wait. A round has seven at most."""

_LEAST_PAUSE, _MOST_PAUSE = 0.05, 3600.0  # seconds between heartbeats, whatever the server asks for
_LEAST_SHARE = 0.8  # of the period: a random part is left out, so that clients spread out
_HANG_UP_SECONDS = 5.0  # away for longer than this, the client ends its connection
_MISSED = 20  # periods without a word of the server, which repeats the period after ten

POLICY = RetryPolicy(
    {
        **dict.fromkeys(StatusCode, Verdict.LATER),
        Superseded.reason: Verdict.DROP,
        Standby.reason: Verdict.LATER,
        OldTerm.reason: Verdict.LATER,
    }
)
"""A client tries to join for ever, unless Connection.join raises Refused."""


class ClientSession:
    """Keeps the client in touch with its server.

    It fills the client's inbox. ServerLink owns it, and it runs on its event loop.

    Args:
        connection: Over which it joins and watches.
        health: Is set to serving while the session is established.
        evaluates: Whether the client evaluates models; if not, orders to do so are answered at once, with no counts.
        tell: Is called with one sentence for each new state of the session.
    """

    def __init__(self, connection: Connection, health: Health, *, evaluates: bool, tell: Callable[[str], None]) -> None:
        self.inbox = WorkInbox(connection.max_jobs)
        # Returns the jobs of a session that wait for a person at this site, with the one whose refusal is being told.
        self.unapproved: Callable[[pb.JoinReply, int], list[int]] = lambda session, refused: []
        self.round_events: asyncio.Queue[pb.ServerEvent] = asyncio.Queue(_MOST_EVENTS)  # for a protection with steps
        self._connection = connection
        self._health = health
        self._evaluates = evaluates
        self._tell = tell
        self._state = ""
        self._matched = False  # whether the server has answered on the current Watch stream
        self._period = 0.0  # seconds between heartbeats now
        self._paced = False  # whether the server chooses the period, and sends no heartbeats otherwise
        self._in_use_since: float | None = None  # since then every Join was refused: another session has this id
        self._activity: pb.Activity.ValueType = pb.ACTIVITY_UNSPECIFIED
        self._progress = 0.0
        self._reports_progress = True
        self._work = (0, 0)  # the round that the client's code works on, and its job
        self._told = 0  # the round of the last heartbeat
        self._ended = 0  # the round whose end was told last
        self._failures: list[pb.Failure] = []
        self._wake = asyncio.Event()
        self._sent = asyncio.Condition()  # is notified after each heartbeat
        self._call: Any = None  # the newest Watch stream

    def begin(self, activity: "pb.Activity.ValueType") -> None:
        """Set the activity that heartbeats report. Any thread may call this."""
        self._activity, self._progress = activity, 0.0

    def advance(self, share: float) -> None:
        """Set the finished share of the activity, 0 to 1.

        Any thread may call this.
        """
        self._progress = share

    def set_reporting(self, reports_progress: bool) -> None:
        """Set whether missing progress means that the client stands still.

        Any thread may call this.
        """
        self._reports_progress = reports_progress

    def occupy(self, round_: int = 0, job_id: int = 0) -> None:
        """Set the round at which the client's code works.

        0 = none. Any thread may call this.
        """
        self._work = (round_, job_id)

    @property
    def occupied(self) -> bool:
        """Whether the client's code works on a round.

        Any thread may ask.
        """
        return self._work[0] > 0

    async def free(self) -> None:
        """Tell the server at once that the client is free.

        It hears nothing if it was told of no work.
        """
        self._work = (0, 0)
        if self._told:
            self._wake.set()

    async def run(self) -> None:
        """Keep up a session for ever.

        Raises:
            Refused: If the server will never give this client a session again.
        """
        tries, wait, obstacle = Tries(self._connection, POLICY), False, ""
        while True:
            try:
                with tries.one():
                    session = await self._connection.join(wait=wait)
                    lost = await self._watch(session)
            except (aio.AioRpcError, FedringError) as error:
                lost = error
            if self._matched:
                tries.reset()
            self._matched = False
            if tries.judge(lost) is Verdict.DROP:
                raise Refused(
                    f"another process has joined as {self._connection.client_id!r}, with the same certificate or "
                    "token, or a copy of this state_dir: give each client an id and a state_dir of its own",
                    Exit.CONFIG,
                )
            if isinstance(lost, aio.AioRpcError) and (is_a(lost, ComeBack) or is_a(lost, InLine)):
                await self._stay_away(retry_seconds_of(lost, most=MOST_AWAY), hang_up=is_a(lost, ComeBack))
                continue
            await self._health.set(serving=False)
            wait = is_unreachable(lost)
            deadline = self._deadline(lost)
            # One look per outage: it takes seconds, and its result is only for the sentence.
            if wait and self._state != "unreachable":
                obstacle = await asyncio.to_thread(self._connection.obstacle, lost)
            self._say(*explain(lost, self._connection, obstacle))
            with suppress(TimeoutError):
                await tries.wait(deadline=deadline)

    async def _stay_away(self, seconds: float, *, hang_up: bool) -> None:
        """Wait until the server may need this client again."""
        why = "does not need this client now" if hang_up else "is greeting many clients"
        self._say("away", f"fl-server at {self._connection.address} {why}; calling again in {seconds:.0f} s")
        if hang_up and seconds > _HANG_UP_SECONDS and not self.occupied:
            await self._connection.hang_up()
        await asyncio.sleep(seconds)

    async def report_evaluation(self, report: pb.EvaluationReport) -> None:
        """Send the result of an evaluation once.

        Errors are logged; the server may have closed the evaluation.
        """
        try:
            with stray_cancellation():
                await self._connection.commands.ReportEvaluation(
                    report, metadata=self._connection.metadata, timeout=CALL_SECONDS
                )
        except (aio.AioRpcError, FedringError) as error:
            level = logging.INFO if status_of(error) is UnknownRound.status else logging.WARNING
            log.log(level, "the server did not take the evaluation of round %d: %s", report.round, reason_of(error))
            if is_doubtful(status_of(error)):
                await self._connection.reconnect()

    async def report_failure(self, failure: pb.Failure) -> None:
        """Report this client's failure with an immediate heartbeat."""
        if assignment := self.inbox.find(failure.round):
            assignment.failure = failure
        self._failures.append(failure)
        self._wake.set()

    async def flush(self, seconds: float) -> None:
        """Wait until the server has read all failures; close the stream.

        This waits at most `seconds`.
        """
        with suppress(TimeoutError, aio.AioRpcError, asyncio.InvalidStateError):
            async with asyncio.timeout(seconds):
                async with self._sent:
                    await self._sent.wait_for(lambda: not self._failures)
                if self._call is not None:  # Cancelling the stream could lose what was written last.
                    await self._call.done_writing()
                    await self._call.code()

    async def _watch(self, session: pb.JoinReply) -> Lost:
        """Follow one Watch stream, and return the error at its end."""
        call = self._call = self._connection.commands.Watch(metadata=self._connection.metadata)
        self._period, self._paced = _pause_of(session.heartbeat_seconds), False
        lost: Lost = Unavailable("the server closed the session")
        async with asyncio.TaskGroup() as group:
            tasks = {group.create_task(self._send_heartbeats(call, session))}
            try:
                events = TimedStream(aiter(call), session.lost_after_seconds)
                async for event in events:
                    await self._health.set(serving=True)
                    self._follow(event, session)
                    events.seconds = session.lost_after_seconds + (_MISSED * self._period if self._paced else 0.0)
                    if answer := self._handle(event):
                        tasks.add(report := group.create_task(self.report_evaluation(answer)))
                        report.add_done_callback(tasks.discard)
                    if self._connection.session_refused:
                        break
            except (aio.AioRpcError, FedringError) as error:
                lost = error
            finally:
                call.cancel()
                for task in tasks:
                    task.cancel()
        return lost

    def _deadline(self, lost: Lost) -> float | None:
        """Return until when to keep trying, in monotonic seconds.

        For ever, unless another session has this client's id.

        Raises:
            Refused: If another session has had the id for as long as the server said to keep trying.
        """
        if not (isinstance(lost, aio.AioRpcError) and is_a(lost, IdInUse)):
            self._in_use_since = None
            return None
        now = time.monotonic()
        if self._in_use_since is None:
            self._in_use_since = now
        deadline = self._in_use_since + retry_seconds_of(lost)
        if deadline > now:
            return deadline
        raise Refused(
            f"another process has joined fl-server at {self._connection.address} as {self._connection.client_id!r}: "
            "give each client an id of its own (client_id); or, if this client's state_dir was lost, start it again "
            "when that session has ended",
            Exit.CONFIG,
        )

    async def _send_heartbeats(self, call: Any, session: pb.JoinReply) -> None:
        while True:
            self._wake.clear()
            try:
                async with asyncio.timeout(session.lost_after_seconds):
                    report = self._report()
                    await call.write(report)
                    if report.HasField("failure"):
                        del self._failures[0]
                    async with self._sent:
                        self._sent.notify_all()
            except (asyncio.InvalidStateError, TimeoutError):
                return  # Whoever reads the stream learns the reason.
            if not self._failures:
                await self._pause(random.uniform(_LEAST_SHARE, 1.0) * self._period)

    async def _pause(self, seconds: float) -> None:
        """Wait until there is something to report, or the time has passed.

        The time is `seconds` without a successful call.
        """
        began = time.monotonic()
        while (left := max(began, self._connection.last_success) + seconds - time.monotonic()) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._wake.wait()
                return

    def _report(self) -> pb.WatchRequest:
        round_, job_id = self._work  # read once, since other threads set it
        self._told = round_
        failure = self._failures[0] if self._failures else None
        failed = self.inbox.find(failure.round) if failure else None
        return pb.WatchRequest(
            matched=self._matched,
            activity=self._activity,
            progress=self._progress,
            reports_no_progress=not self._reports_progress,
            failure=failure,
            work=pb.Work(round=round_, job_id=job_id, ended_round=self._ended),
            unapproved_jobs=self.unapproved(self._connection.session, failed.command.job.job_id if failed else 0),
        )

    def _follow(self, event: pb.ServerEvent, session: pb.JoinReply) -> None:
        """Beat as often as the event says."""
        before = self._period
        match event.WhichOneof("event"):
            case "heartbeat" if event.heartbeat.period_seconds > 0:
                self._period, self._paced = _pause_of(event.heartbeat.period_seconds), True
            case "train" | "evaluate":
                self._period = _pause_of(session.heartbeat_seconds)
        if self._period < before:
            self._wake.set()  # The server must learn soon that this client is alive.

    def _handle(self, event: pb.ServerEvent) -> pb.EvaluationReport | None:
        """Handle an event, and return a report to send at once."""
        if event.WhichOneof("event") not in _OF_SESSIONS:
            try:
                self.round_events.put_nowait(event)
            except asyncio.QueueFull:
                log.warning("dropped an event of a round: the server sends more of them than this client can answer")
        match event.WhichOneof("event"):
            case "heartbeat" if not self._matched:
                self._matched = True
                self._wake.set()
                self._say("watching", f"in session with fl-server at {self._connection.address}")
            case "train":
                assignment = self.inbox.train(event.train, self._connection.last_accepted)
                if assignment.failure:  # The server was restarted and has forgotten it.
                    self._failures.append(assignment.failure)
                    self._wake.set()
            case "evaluate" if self._evaluates:
                self.inbox.evaluate(event.evaluate)
            case "evaluate":
                order = event.evaluate
                return pb.EvaluationReport(round=order.round, model_digest=order.model_digest)
            case "round_ended":
                self.inbox.end(event.round_ended.round, event.round_ended.reason)
                self._ended = event.round_ended.round
                self._wake.set()  # The next round waits until the server knows whether this client is free.
        return None

    def _say(self, state: str, sentence: str) -> None:
        """Log and tell a change of state, once, however many attempts follow."""
        if state != self._state:
            self._state = state
            log.log(logging.INFO if state == "watching" else logging.WARNING, "%s", sentence, extra={"state": state})
            self._tell(sentence)


def _pause_of(seconds: float) -> float:
    """Return the longest time between two heartbeats.

    The server may have sent any number.
    """
    return min(seconds, _MOST_PAUSE) if seconds >= _LEAST_PAUSE else _LEAST_PAUSE
