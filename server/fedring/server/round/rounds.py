"""The round in progress, and the clients that can take part in it.

Services report to `Rounds` what clients say and do, and ask it what the round takes. It keeps the state of the
machine, tells operators and clients what changes, and performs nothing: that is `fedring.server.round.runner`.
"""

import asyncio
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import inf

from opentelemetry import trace

from fedring.daemon.notify import sd_notify
from fedring.daemon.tracing import start_span, traceparent_of
from fedring.rpc.errors import Unavailable, UnknownRound
from fedring.server.group import machine as gr
from fedring.server.group.rendezvous import Rendezvous
from fedring.server.round import machine as rd
from fedring.server.round.dispatch import Dispatch
from fedring.server.round.eligibility import check_eligible
from fedring.server.round.evaluation import check_evaluation, classified
from fedring.server.round.events import (
    OPEN,
    Abandoned,
    Delayed,
    Delivered,
    Enlisted,
    Evaluated,
    Event,
    Failed,
    Matched,
    Moved,
    Phase,
    Round,
    Stalled,
    State,
)
from fedring.server.round.metrics import RoundMetrics
from fedring.server.round.open_round import ClientTraffic, OpenRound
from fedring.server.round.plan import group_rules
from fedring.server.round.report import open_message
from fedring.server.sessions.sessions import Session, Sessions
from fedring.server.state.facts import Facts
from fedring.server.state.journal import Journal, printable
from fedring.server.state.rows import EvaluationRow, ModelRow, RoundRow, UpdateRow
from fedring.v1 import control_pb2 as control
from fedring.v1 import federation_pb2 as pb
from fedring.v1.rendezvous_pb2 import Done

_REASON = re.compile(r"[a-z0-9_]{1,64}")

_FAULTS_OF_THE_CODE = ("train_error", "cannot_cut")
"""Failures in which the job's next rounds would end, too."""

_FAULTS_OF_THE_WORKER = ("out_of_memory", "disk_failed")
"""Failures that another worker in the place of this one may not have."""


class Rounds:
    """The round in progress, for services, the runner, and operators. Used from one event loop.

    Attributes:
        state: the machine's state: all clients that are here, and the round.
        open: what the server keeps of the round in progress beyond that; None without a round.
        last: the row of the round that ended last; None if none has.
        latest: the newest model.
        recovering: whether a round that a restart interrupted waits to be resumed.
        settling: held while a phase of the round ends, and while a batch of updates is committed.
        changed: set whenever the state has changed; whoever waits for it clears it.
        rendezvous: the group of the round, if its workers train together.
    """

    def __init__(self, facts: Facts, sessions: Sessions, journal: Journal, metrics: RoundMetrics) -> None:
        self.state = State()
        self.open: OpenRound | None = None
        self.last: RoundRow | None = None
        self.latest: ModelRow | None = None
        self.recovering = False
        self.settling = asyncio.Lock()
        self.changed = asyncio.Event()
        self.rendezvous = Rendezvous(lambda: sessions.returns.slowest)
        self._facts, self._sessions, self._journal, self._metrics = facts, sessions, journal, metrics
        self._dispatch = Dispatch(sessions)
        self._trace = RoundTrace()
        metrics.follow(lambda: self.state)

    def handle(self, event: Event) -> None:
        """Take the event into the state. What it makes due is done by the runner soon."""
        now = time.monotonic()
        before, self.state = self.state.round, rd.apply(self.state, event, now)
        self._metrics.moved(before, self.state.round, now)
        self._trace.follow(self.state.round)
        self.changed.set()
        self.expect_workers()

    def begin(self, open_: OpenRound) -> None:
        """Take up a round that is opened or resumed; its event must follow at once."""
        open_.command.traceparent = self._trace.begin(open_.row.round, open_.row.job_id)
        self.open = open_
        self.recovering = False

    def gather(self, *, resumed: bool = False) -> None:
        """Let the workers of the round gather, if it needs a group."""
        if self.open is not None and self.open.job.grouped:
            row, job = self.open.row, self.open.job
            rules = group_rules(job, target=len(row.selected))
            self.rendezvous.open(row.round, rules, row.selected, self.open.done, resumed=resumed)

    def learn(self, model: ModelRow) -> None:
        """Note a model that may be the newest."""
        if self.latest is None or model.version > self.latest.version:
            self.latest = model

    def end(self, row: RoundRow) -> None:
        """Let go of the round in progress, which is over."""
        self.open, self.last = None, row

    def matched(self, client: str) -> None:
        """Note that the client watches both ways. It counts from now on, and is sent what it is waited for with."""
        self.handle(Matched(client))
        if self.last is not None and "secure" in self.last.stats:
            self._dispatch.over(self.last, self.latest, client)  # it may have secrets of the round still
        if self.open is not None and self.state.round is not None:
            self._dispatch.remind(self.open, self.state.round, self.latest, client)

    async def evaluated(self, client: str, report: pb.EvaluationReport) -> None:
        """Keep the client's counts of the new model.

        Raises:
            BadRequest, UnknownRound: if the round is not, or no longer, evaluated by this client: see
                `check_evaluation`.
        """
        known = (row.round for row in (self.open and self.open.row, self.last) if row)
        version = check_evaluation(report, client, self.state.round, self.latest, newest=max(known, default=0))
        counts = (report.correct, report.total, report.loss_sum, classified(report), dict(report.metrics))
        row = EvaluationRow(report.round, version, client, *counts)
        await self._facts.db(self._facts.store.add_evaluation, row)
        if self.state.round is not None and self.state.round.number == report.round:  # it may have ended meanwhile
            self.handle(Evaluated(client))

    def failed(self, client: str, failure: pb.Failure) -> None:
        """Note that the client could not do what the round asked."""
        before = self.state.round
        if before is not None:
            self.handle(Failed(client, failure.round))
        if self.state.round == before:
            return  # the failure is of another round, or was reported before
        reason = failure.reason if _REASON.fullmatch(failure.reason) else "bad_reason"
        # All that follows is shown to operators and to other clients, on terminals, too.
        text = f"{client} could not train: {reason}: {printable(failure.detail[:1000])}"
        self._journal.write("client_failed", text, client_id=client)
        if self.open is None:
            return
        self.open.failures.append(text)
        # A pipeline cannot do without any of its workers, and code that fails on one would fail on its replacement.
        of_the_worker = reason in _FAULTS_OF_THE_WORKER
        if self.open.job.mode == "pipeline" and not of_the_worker and self.rendezvous.can_give_up:
            self.group(gr.Closed(reason))
            self.open.retryable = self.open.retryable and reason not in _FAULTS_OF_THE_CODE

    def lied(self, client: str, why: str) -> None:
        """Note that a client was proved to have sent wrong shares: the job's later rounds go on without it.

        Args:
            client: the client.
            why: a clause that says what it did.
        """
        open_ = self.open
        if open_ is None or client in open_.liars:
            return
        open_.liars |= {client}
        text = f"{open_.title}: bad_share: {client} sent wrong shares, and later rounds go on without it: {why}"
        self._journal.write(
            "client_lied", text, job_id=open_.row.job_id, client_id=client, state=self.message(clients=False)
        )

    def stalls_at(self, session: Session) -> float:
        """Return when the client is stalled unless it makes progress before, monotonic seconds; inf means never."""
        if session.transfers or not session.reports_progress:
            return inf
        return rd.stalls_at(self.state.round, session.client_id, session.moved)

    def stalled(self, client: str) -> None:
        """Note that the client has made no progress for too long: the round goes on without it, until it does."""
        self._note_stalled(Stalled(client))
        if self.open is not None:
            self._metrics.stalled.inc()
            seconds = self.open.job.stalled_after_seconds
            text = f"{client} is stalled: it has reported no progress for {seconds:g} s, and nobody waits for it"
            state = self.message()
            self._journal.write("client_stalled", text, job_id=self.open.row.job_id, client_id=client, state=state)

    def moved(self, client: str) -> None:
        """Note that the client makes progress."""
        if self.state.round is not None and client in self.state.round.stalled:
            self._note_stalled(Moved(client))
            text = f"{client} makes progress again"
            job_id = self.open.row.job_id if self.open else 0
            self._journal.write("client_moves", text, job_id=job_id, client_id=client, state=self.message())

    @contextmanager
    def transfer(self, session: Session) -> Iterator[None]:
        """Count an upload or a download of the client: while one is in progress, the client is not stalled."""
        self.moved(session.client_id)
        session.transfers += 1
        try:
            yield
        finally:
            session.transfers -= 1
            session.moved = time.monotonic()

    def _note_stalled(self, event: Stalled | Moved) -> None:
        self.handle(event)
        if self.open is not None and self.state.round is not None:
            self.open.stalled = self.state.round.stalled

    def group(self, event: gr.Event) -> None:
        """Take an event into the state of the round's group, and tell operators what follows from it."""
        for kind, text in self.rendezvous.handle(event):
            self.tell(kind, text)

    def worker_done(self, client: str, done: Done) -> None:
        """Note that a worker of the round's group has trained to the end."""
        self.rendezvous.note(client, done)
        self.group(gr.Done(client, done.generation, done.digest, not done.cannot_deliver))

    def expect_workers(self) -> None:
        """Tell the round's group whom the round still waits for; the grace of a client may have ended."""
        if self.rendezvous.active:
            self.group(gr.Expected(rd.pending(self.state, time.monotonic())))

    def deliverable(self, run_id: str, number: int, client: str) -> OpenRound:
        """Return the round in progress, if it takes an update of the client.

        Raises:
            Unavailable: if the server has just started, and the round waits to be resumed.
            UnknownRound: if the round does not take it: see `check_eligible`.
        """
        if self.recovering:
            raise Unavailable("the server has just started: try again")
        open_ = self.open
        if run_id != self._facts.store.run_id:
            raise UnknownRound("the update belongs to another run")
        if open_ is None:
            raise UnknownRound(f"round {number} is not open")
        workers = self.rendezvous.workers if open_.job.grouped else None
        check_eligible(self.state.round, number, client, workers=workers)
        if open_.secure is not None:
            open_.secure.check_update(client)
        return open_

    def accepted(self, rows: Sequence[UpdateRow]) -> None:
        """Count updates that became durable together. `settling` must be held."""
        open_ = self.open
        if open_ is None:
            return
        for row in rows:
            open_.accepted[row.client_id] = row
            self.handle(Delivered(row.client_id))
            open_.stalled -= {row.client_id}
        state = self.message(clients=False)  # the same for all of them, since they became durable at once
        for row in rows:
            text = f"{row.client_id} delivered {row.num_samples} samples, {row.total_bytes} bytes"
            self._journal.write("update_accepted", text, job_id=open_.row.job_id, client_id=row.client_id, state=state)

    async def abandon(self, reason: str) -> int:
        """End the round in progress without a model. Returns its number, or 0 if none can be ended."""
        async with self.settling:
            round_, open_ = self.state.round, self.open
            if round_ is None or open_ is None or round_.phase not in OPEN:
                return 0
            if round_.phase is Phase.AGGREGATING:
                open_.stop_reason = reason  # holds if the disk refuses the model; else it is published in a moment
                if not open_.waits_for_disk and not open_.waits_for_shares:
                    return 0
            self.handle(Abandoned(reason))
            return round_.number

    async def enlist(self, client: str) -> None:
        """Let one more client take part in the round in progress."""
        async with self.settling:
            open_, round_ = self.open, self.state.round
            if open_ is None or round_ is None or round_.phase is not Phase.TRAINING:
                return
            row = replace(open_.row, selected=tuple(sorted({*open_.row.selected, client})))
            await self._facts.db(self._facts.store.update_round, row)
            open_.row = row
            self.handle(Enlisted(client))
        self._dispatch.train(open_, client)

    def give_time_back(self, since: float) -> None:
        """Do not count the time since then, in which nothing could be kept; `since` is in monotonic seconds."""
        open_, round_ = self.open, self.state.round
        if open_ is not None and round_ is not None:
            seconds = time.monotonic() - max(since, round_.since)
            if open_.started:
                open_.started += seconds
            self.handle(Delayed(seconds))
            if open_.secure is not None:
                open_.secure.delay(seconds)

    def traffic(self, client: str) -> ClientTraffic:
        """Return the counters of what the client moves now."""
        return self.open.traffic.setdefault(client, ClientTraffic()) if self.open else ClientTraffic()

    @property
    def ids(self) -> dict[str, object]:
        """The round in progress and its job, for logs."""
        return {"round": self.open.row.round, "job": self.open.row.job_id} if self.open else {}

    def message(self, *, clients: bool = True) -> control.Round | None:
        """Return the round in progress for operators, or None.

        Args:
            clients: whether the message lists what each client did.
        """
        return open_message(self.open, self.state.round, clients=clients) if self.open and self.state.round else None

    def tell(self, kind: str, text: str) -> None:
        """Write an event of the round in progress to the journal and to systemd's status."""
        if self.open is not None:
            sd_notify(f"STATUS={text}")
            self._journal.write(kind, text, job_id=self.open.row.job_id, state=self.message())


class RoundTrace:
    """Makes a span of the round in progress, and one of each of its phases."""

    def __init__(self) -> None:
        self._round: trace.Span | None = None
        self._phase: trace.Span | None = None
        self._at: Phase | None = None

    def begin(self, number: int, job_id: int) -> str:
        """Begin the span of a round. Returns its traceparent, for the clients that take part."""
        self._round = start_span("round", round=number, job=job_id)
        return traceparent_of(self._round)

    def follow(self, round_: Round | None) -> None:
        """End the span of a phase that is over, and begin that of the next; without a round, end all."""
        phase = round_.phase if round_ else None
        if phase is self._at or self._round is None:
            return
        self._at = phase
        if self._phase:
            self._phase.end()
        if phase:
            self._phase = start_span(phase, traceparent_of(self._round))
        else:
            self._round.end()
            self._round = self._phase = None
