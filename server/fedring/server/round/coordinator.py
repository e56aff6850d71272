"""The shell around the state machine: it keeps the state, asks what is due, and does it.

Handlers report events; one task performs effects. What must survive is in the store before anybody is told.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf

from fedring.codec import CodecError
from fedring.daemon.notify import sd_notify
from fedring.rpc.errors import Unavailable, UnknownRound
from fedring.server.config import ServerConfig
from fedring.server.group import machine as gr
from fedring.server.group.rendezvous import Rendezvous
from fedring.server.model.damage import DamagedModel, DamagedUpdates
from fedring.server.model.models import Models
from fedring.server.model.optimizer import OptimizerError
from fedring.server.model.testset import TestSet
from fedring.server.round import machine as rd
from fedring.server.round.dispatch import Dispatch
from fedring.server.round.eligibility import check_eligible
from fedring.server.round.evaluation import check_evaluation
from fedring.server.round.lineage import base_of, evaluation, prune, publish
from fedring.server.round.metrics import Metrics
from fedring.server.round.open_round import OpenRound
from fedring.server.round.plan import gather, round_command, rules_of
from fedring.server.round.progress import Progress, why_abandoned
from fedring.server.round.report import open_message
from fedring.server.round.sessions import Sessions, Traffic
from fedring.server.round.trace import RoundTrace
from fedring.server.state.blobs import StorageError, StorageFailed
from fedring.server.state.facts import Facts
from fedring.server.state.journal import Journal
from fedring.server.state.rows import EvaluationRow, JobRow, ModelRow, RoundRow, UpdateRow
from fedring.train.job import Job
from fedring.v1 import control_pb2 as control
from fedring.v1 import federation_pb2 as pb

log = logging.getLogger(__name__)

_OF_THE_CODE = ("train_error", "cannot_cut")  # failures that the job's next rounds would end in, too
_OF_THE_WORKER = "out_of_memory"  # a failure that another one in its place may not have
RECOVERY_SECONDS = 30.0  # that clients have to come back after a restart, if the deadline is not sooner


class Coordinator:
    """Runs rounds; knows nothing of gRPC but the messages."""

    def __init__(
        self, facts: Facts, models: Models, sessions: Sessions, journal: Journal, config: ServerConfig
    ) -> None:
        self.facts, self.models, self.sessions, self.journal = facts, models, sessions, journal
        self.test_set = TestSet(facts.blobs, config)
        self.state = rd.State()
        self.open: OpenRound | None = None
        self.last: RoundRow | None = None  # that ended
        self.latest: ModelRow | None = None
        self.recovering = False  # a round of before waits to be resumed
        self.why = ""  # the last round was abandoned, for people
        self.hopeless = False  # the job's next rounds would end as the last one did
        self.settling = asyncio.Lock()
        self.finished = asyncio.Event()  # set whenever no round is open
        self.finished.set()
        self.rendezvous = Rendezvous(self._tell, sessions.returns)
        self._dispatch = Dispatch(sessions)
        self._trace = RoundTrace()
        self._config = config
        self._wake = asyncio.Event()
        self.metrics = Metrics()
        self.metrics.follow(lambda: self.state, facts)
        self._progress = Progress()

    def handle(self, event: rd.Event) -> None:
        """Take the event into the state; what it makes due is done soon."""
        now = time.monotonic()
        before, self.state = self.state.round, rd.apply(self.state, event, now)
        self.metrics.moved(before, self.state.round, now)
        self._trace.follow(self.state.round)
        self._wake.set()
        if self.rendezvous.active:
            self.rendezvous.handle(gr.Expected(rd.pending(self.state, now)))

    def matched(self, client: str) -> None:
        """The client watches both ways: it counts, and is told what it is waited for with."""
        self.handle(rd.Matched(client))
        if self.open is not None and self.state.round is not None:
            self._dispatch.remind(self.open, self.state.round, self.latest, client)

    async def evaluated(self, client: str, report: pb.EvaluationReport) -> None:
        """Keep the client's counts; UnknownRound if its round is not being evaluated, or no longer."""
        known = (row.round for row in (self.open and self.open.row, self.last) if row)
        version = check_evaluation(report, client, self.state.round, self.latest, newest=max(known, default=0))
        row = EvaluationRow(report.round, version, client, report.correct, report.total, report.loss_sum)
        await self.facts.db(self.facts.store.add_evaluation, row)
        if self.state.round is not None and self.state.round.number == report.round:  # still
            self.handle(rd.Evaluated(client))

    def failed(self, client: str, failure: pb.Failure) -> None:
        """The client could not do what the round asked."""
        before = self.state.round
        if before is not None:
            self.handle(rd.Failed(client, failure.round))
        if self.state.round == before:
            return  # of another round, or told again
        text = f"{client} could not train: {failure.reason[:64]}: {failure.detail[:1000]}"
        self.journal.write("client_failed", text, client_id=client)
        if self.open is not None:
            self.open.failures.append(text)
        # A pipeline cannot do without any of its workers, and code that fails on one would fail on its replacement.
        whole = self.open is not None and self.open.job.mode == "pipeline" and failure.reason != _OF_THE_WORKER
        if whole and self.rendezvous.give_up(failure.reason[:64]) and failure.reason in _OF_THE_CODE:
            self.hopeless = True

    def traffic(self, client: str) -> Traffic:
        """Where to count what the client moves now."""
        return self.open.traffic.setdefault(client, Traffic()) if self.open else Traffic()

    @property
    def ids(self) -> dict[str, object]:
        """The round in progress and its job, for logs."""
        return {"round": self.open.row.round, "job": self.open.row.job_id} if self.open else {}

    async def start_round(self, job: JobRow, spec: Job, job_round: int) -> int:
        """Open the next round of a job; returns its number."""
        base = await base_of(self.facts, self.models, self.latest, job, spec)
        if self.latest is None or base.version > self.latest.version:  # a new one
            self.latest = base
        if spec.evaluate_on_server:
            await self.facts.heavy(self.test_set.load, spec)
        small = self.models.small(base, spec)  # before there is a row: it may fail, and be tried again
        wanted = RoundRow(0, job.job_id, job_round, rd.Phase.WAITING, time.time(), base_version=base.version)
        row = await self.facts.db(self.facts.store.create_round, wanted)
        self._begin(row, spec, base, small)
        self.handle(rd.Opened(row.round, rules_of(spec, grace=self._config.lost_after_seconds)))
        return row.round

    async def resume_round(self, row: RoundRow, spec: Job) -> None:
        """Go on with the round that a restart interrupted; its clients have time to come back."""
        base = await self.facts.db(self.facts.store.model, row.base_version)
        if base is None:
            raise StorageError("missing_model", f"round {row.round} starts from model {row.base_version}, now gone")
        self.models.remember(base)
        small = self.models.small(base, spec)
        rules = rules_of(spec, grace=self._config.lost_after_seconds)
        seconds = rules.seconds(rd.Phase(row.phase))
        elapsed = 0.0 if row.seconds_left is None else max(0.0, seconds - row.seconds_left)
        if row.phase == rd.Phase.WAITING:
            self._begin(row, spec, base, small)
            self.handle(rd.Opened(row.round, rules, elapsed))
            return
        updates = await self.facts.db(self.facts.store.updates_of, row.round)
        open_ = self._begin(replace(row, phase=rd.Phase.TRAINING), spec, base, small)
        open_.accepted = {update.client_id: update for update in updates}
        open_.started = time.monotonic() - elapsed
        selected, delivered = frozenset(row.selected), frozenset(open_.accepted)
        # An aggregation that was cut off is simply due again.
        resumed = rd.Round(row.round, rules, rd.Phase.TRAINING, 0.0, selected=selected, delivered=delivered)
        self.handle(rd.Resumed(resumed, RECOVERY_SECONDS, elapsed))
        gather(self.rendezvous, open_, resumed=True)
        for session in self.sessions:
            if session.matched:
                self.matched(session.client_id)

    async def abandon(self, reason: str) -> int:
        """End the round in progress without a model; its number, 0 if none can be ended."""
        async with self.settling:
            round_, open_ = self.state.round, self.open
            if round_ is None or open_ is None or round_.phase not in rd.OPEN:
                return 0
            if round_.phase is rd.Phase.AGGREGATING:
                open_.stop = reason  # if the disk refuses its model; else it is published in a moment
                if not open_.waits_for_disk:
                    return 0
            self.handle(rd.Abandoned(reason))
            return round_.number

    async def enlist(self, client: str) -> None:
        """One more client takes part in the round in progress."""
        async with self.settling:
            open_, round_ = self.open, self.state.round
            if open_ is None or round_ is None or round_.phase is not rd.Phase.TRAINING:
                return
            row = replace(open_.row, selected=tuple(sorted({*open_.row.selected, client})))
            await self.facts.db(self.facts.store.update_round, row)
            open_.row = row
            self.handle(rd.Enlisted(client))
        self._dispatch.train(open_, client)

    async def run(self) -> None:
        """Do what is due, for ever."""
        while True:
            now = time.monotonic()
            self._wake.clear()
            effect = rd.due(self.state, now)
            if self.open and self.facts.storage.fault and isinstance(effect, rd.Start | rd.Aggregate | rd.Abandon):
                # What clients offer is refused meanwhile.
                await self._wait_for_disk(self.open, phase=rd.Phase(self.open.row.phase))
                continue
            if effect is not None:
                await self._perform(effect)
                continue
            if self.rendezvous.active:  # a client's grace may have ended
                self.rendezvous.handle(gr.Expected(rd.pending(self.state, now)))
            wait = min(rd.wake_at(self.state, now) - now, self._tell_progress(now))
            with suppress(TimeoutError):  # a deadline is due
                async with asyncio.timeout(None if wait == inf else max(wait, 0.001)):
                    await self._wake.wait()

    async def _perform(self, effect: rd.Effect) -> None:
        open_ = self.open
        if open_ is None:
            raise rd.IllegalEvent(f"{effect} without an open round")
        async with self.settling:
            if rd.due(self.state, time.monotonic()) != effect:
                return  # an update was accepted, or the round was stopped, just before
            match effect:
                case rd.Start(clients):
                    await self._start(open_, clients)
                case rd.Aggregate():
                    self.handle(rd.Closed())
                case rd.Abandon(reason):
                    self.handle(rd.Abandoned(reason))
        if isinstance(effect, rd.Start) and open_.started:
            await self.facts.keep(self.prune)  # now, as the clients train: nobody waits for it
        elif isinstance(effect, rd.Aggregate):
            await self._aggregate(open_)
        elif isinstance(effect, rd.Finish):
            await self._finish(open_)

    async def _start(self, open_: OpenRound, clients: frozenset[str]) -> None:
        row = replace(open_.row, phase=rd.Phase.TRAINING, selected=tuple(sorted(clients)), seconds_left=None)
        try:
            await self.facts.db(self.facts.store.update_round, row)
        except StorageFailed:
            return  # it is due again, and waits for the disk where a stop need not wait
        open_.row, open_.started = row, time.monotonic()
        self.handle(rd.Started(clients))
        gather(self.rendezvous, open_)
        self._dispatch.train_all(open_, clients)
        text = f"round {row.round} ({row.job_round}/{open_.job.rounds}) trains on {len(clients)} clients"
        self._tell("round_started", text)

    async def _aggregate(self, open_: OpenRound) -> None:
        if open_.missing:
            log.warning("round %d ends without %s", open_.row.round, ", ".join(open_.missing))
        while self.state.round is not None and self.state.round.phase is rd.Phase.AGGREGATING:
            if open_.stop:
                return self.handle(rd.Abandoned(open_.stop))
            try:
                with self.metrics.aggregate_seconds.time():
                    model, ended = await publish(self.facts, self.models, open_)
            except StorageFailed as error:
                log.warning("the model of round %d waits for the disk: %s", open_.row.round, error)
                if not open_.stop:
                    await self._wait_for_disk(open_, phase=rd.Phase.AGGREGATING)
            except DamagedUpdates as error:
                await self.facts.keep(self._go_on_without, open_, error)
            except (StorageError, CodecError, OptimizerError, RuntimeError) as error:  # the last is torch's
                log.error("the round makes no model: %s", error, exc_info=not isinstance(error, StorageError))
                if isinstance(error, DamagedModel):
                    self._despair(open_, error)
                self.handle(rd.Abandoned(getattr(error, "reason", "bad_optimizer")))
            else:
                self._published(open_, model, ended)

    def _published(self, open_: OpenRound, model: ModelRow, ended: RoundRow) -> None:
        open_.row, self.latest = ended, model
        self.models.remember(model)
        evaluators = [s.client_id for s in self.sessions if s.matched] if open_.job.evaluate else []
        self.handle(rd.Published(frozenset(evaluators)))
        self._end(open_)
        for client in evaluators:
            self._dispatch.evaluate(open_, model, client)
        text = f"round {ended.round} published model {model.version} in {ended.stats['seconds']:.2f} s"
        self._tell("round_published", text)

    async def _wait_for_disk(self, open_: OpenRound, *, phase: rd.Phase) -> None:
        """Return when the disk takes what is to be kept, or the phase has ended."""
        open_.waits_for_disk = True
        while self.facts.storage.fault and self.state.round is not None and self.state.round.phase is phase:
            self._wake.clear()
            await self.facts.storage.works_or(self._wake)
        open_.waits_for_disk = False

    async def _go_on_without(self, open_: OpenRound, error: DamagedUpdates) -> None:
        """Forget accepted updates that are damaged; the round ends without them, or cannot."""
        await self.facts.db(self.facts.drop_updates, open_.row.round, sorted(error.clients))
        for client, text in error.clients.items():
            del open_.accepted[client]
            self.handle(rd.Lost(client))
            text = f"{text}: what it had learned is lost"
            open_.failures.append(text)
            self.journal.write("blob_damaged", text, job_id=open_.row.job_id, client_id=client, state=self.message())
        round_ = self.state.round
        if round_ is not None and len(round_.delivered) < round_.rules.min_to_aggregate:
            self.handle(rd.Abandoned(error.reason))

    async def damaged(self, error: DamagedModel) -> None:
        """End the round in progress, and its job, if it starts from the model that turned out to be damaged."""
        open_, round_ = self.open, self.state.round
        if open_ is None or round_ is None or open_.base.version != error.version or round_.phase not in rd.OPEN:
            return log.error("%s", error.detail)
        self._despair(open_, error)
        await self.abandon(error.reason)

    def _despair(self, open_: OpenRound, error: DamagedModel) -> None:
        open_.failures.insert(0, error.detail)
        self.hopeless = True
        self._tell("blob_damaged", error.detail)

    async def _finish(self, open_: OpenRound) -> None:
        round_ = self.state.round
        if round_ is not None and round_.phase is rd.Phase.ABANDONED:
            open_.row = open_.ended(rd.Phase.ABANDONED, reason=round_.reason)
            await self.facts.keep(self.facts.db, self.facts.store.update_round, open_.row)
            self._end(open_)
            away = () if open_.row.selected else await self.facts.db(self.facts.store.update_counts)
            self.why = why_abandoned(open_, self.state, away)
            self._tell("round_abandoned", f"round {round_.number} was abandoned: {self.why}")
        elif self.latest is not None:
            await self._finish_evaluation(open_, self.latest)
        self.open, self.last = None, open_.row
        await self.facts.db(self.facts.blobs.drop_partials, f"{open_.row.round}-")
        self.handle(rd.Finished())
        self.finished.set()

    async def _finish_evaluation(self, open_: OpenRound, model: ModelRow) -> None:
        stats, summed = await evaluation(self.facts, self.test_set, open_, model)
        self.metrics.evaluated(stats)
        open_.row = replace(open_.row, stats=stats)
        await self.facts.keep(self.facts.db, self.facts.store.update_round, open_.row)
        accuracy = f": accuracy {summed.correct / summed.total:.4f}" if summed and summed.total else ""
        self._tell("round_evaluated", f"round {open_.row.round} is evaluated{accuracy}")

    async def prune(self) -> None:
        """Let go of what is older than the configuration keeps."""
        await prune(self.facts, self.models, self._config, self.open)

    def _begin(self, row: RoundRow, spec: Job, base: ModelRow, small: pb.SmallModel | None) -> OpenRound:
        most, store = self._config.max_update_bytes, self.facts.store
        command = round_command(spec, row, base, run_id=store.run_id, epoch=store.epoch, most_bytes=most)
        command.traceparent = self._trace.begin(row.round, row.job_id)
        self.open = OpenRound(row, spec, command, base, small)
        self.recovering = self.hopeless = False
        self.finished.clear()
        return self.open

    def deliverable(self, run_id: str, number: int, client: str) -> OpenRound:
        """Return the round in progress if it takes an update of the client; Unavailable or UnknownRound if not."""
        if self.recovering:
            raise Unavailable("the server has just started: try again")
        if run_id != self.facts.store.run_id:
            raise UnknownRound("the update belongs to another run")
        workers = self.rendezvous.workers if self.open is not None and self.open.job.grouped else None
        check_eligible(self.state.round, number, client, workers=workers)
        if self.open is None:
            raise rd.IllegalEvent("a round without its shell")
        return self.open

    def accepted(self, rows: Sequence[UpdateRow]) -> None:
        """Count updates that have become durable together. Call this while `settling` is held."""
        open_ = self.open
        if open_ is None:
            return
        for row in rows:
            open_.accepted[row.client_id] = row
            self.handle(rd.Delivered(row.client_id))
            self.metrics.accepted(row)
        state = self.message(clients=False)  # the same for all, which became durable at once
        for row in rows:
            text = f"{row.client_id} delivered {row.num_samples} samples, {row.total_bytes} bytes"
            self.journal.write("update_accepted", text, job_id=open_.row.job_id, client_id=row.client_id, state=state)

    def _end(self, open_: OpenRound) -> None:
        self.rendezvous.close(open_.row.reason)
        self._dispatch.ended(open_, self.latest)

    def message(self, *, clients: bool = True) -> control.Round | None:
        """The round in progress for operators, or None; without `clients`, what each of them did is left out."""
        return open_message(self.open, self.state.round, clients=clients) if self.open and self.state.round else None

    def _tell(self, kind: str, text: str) -> None:
        if self.open is None:
            return
        sd_notify(f"STATUS={text}")
        self.journal.write(kind, text, job_id=self.open.row.job_id, state=self.message())

    def _tell_progress(self, now: float) -> float:
        """Tell what an open barrier waits for, or log what a round does; the seconds until there may be more."""
        text, seconds = self._progress.news(self.state, now)
        if text and self.state.round is not None and self.state.round.phase is rd.Phase.WAITING:
            self._tell("round_waits", text)
        elif text:  # its updates are told one by one
            log.info("%s", text)
        return seconds
