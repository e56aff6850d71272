"""What runs a round: it asks the machine what is due, does it, and says in the end what came of the round.

One task performs the effects of one round, one after the other. Whatever must survive is in the store before anybody is
told of it.
"""

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf

from fedring.codec import CodecError
from fedring.server.config import ServerConfig
from fedring.server.group import machine as gr
from fedring.server.model.models import Models
from fedring.server.model.optimizer import OptimizerError
from fedring.server.model.rule import RuleError
from fedring.server.model.testset import TestSet
from fedring.server.round import machine as rd
from fedring.server.round.dispatch import Dispatch
from fedring.server.round.events import (
    OPEN,
    Abandon,
    Abandoned,
    Aggregate,
    Closed,
    Effect,
    Finish,
    Finished,
    Lost,
    MakeModel,
    Phase,
    Published,
    Round,
    Start,
    Started,
    TakeStep,
)
from fedring.server.round.lineage import evaluation, prune, publish
from fedring.server.round.metrics import RoundMetrics
from fedring.server.round.open_round import OpenRound
from fedring.server.round.private_rounds import RoundPrivacy
from fedring.server.round.progress import RoundProgress, why_abandoned
from fedring.server.round.rounds import Rounds
from fedring.server.sessions.sessions import Sessions
from fedring.server.state.facts import Facts
from fedring.server.state.failures import DamagedModel, DamagedUpdates, StorageError, StorageFailed
from fedring.server.state.rows import ModelRow, RoundRow
from fedring.train.errors import SeamError
from fedring.train.metrics import result_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RoundResult:
    """What came of a round."""

    published: bool
    reason: str = ""  # why it was abandoned, for people
    retryable: bool = True  # False if the job's next rounds would end in the same way


class RoundRunner:
    """Runs rounds that were opened or resumed to their ends, each in its own task."""

    def __init__(
        self,
        rounds: Rounds,
        facts: Facts,
        models: Models,
        sessions: Sessions,
        privacy: RoundPrivacy,
        metrics: RoundMetrics,
        test_set: TestSet,
        config: ServerConfig,
    ) -> None:
        self._rounds, self._facts, self._models = rounds, facts, models
        self._sessions, self._privacy, self._metrics = sessions, privacy, metrics
        self._test_set, self._config = test_set, config
        self._dispatch = Dispatch(sessions)

    async def run(self, open_: OpenRound) -> RoundResult:
        """Do what is due until a round that was opened or resumed has ended."""
        rounds, progress = self._rounds, RoundProgress()
        while True:
            open_.changed.clear()
            now = time.monotonic()
            effect = rd.due(open_.state, now)
            if self._facts.storage.fault and isinstance(effect, Start | Aggregate | Abandon):
                # What clients offer is refused meanwhile.
                await self._wait_for_disk(open_)
            elif isinstance(effect, Finish):
                return await self._finish(open_)
            elif effect is not None:
                await self._perform(open_, effect)
            else:
                rounds.expect_workers(open_)
                wait = min(rd.wake_at(open_.state, now) - now, self._tell_progress(open_, progress, now))
                with suppress(TimeoutError):  # a deadline is due
                    async with asyncio.timeout(None if wait == inf else max(wait, 0.001)):
                        await open_.changed.wait()

    async def damaged(self, error: DamagedModel) -> None:
        """End the rounds, and their jobs, that start from the model that turned out to be damaged."""
        hit = [each for each in self._rounds if each.base.version == error.version and each.phase in OPEN]
        for open_ in hit:
            self._note_damage(open_, error)
            await self._rounds.abandon(open_, error.reason)
        if not hit:
            log.error("%s", error.detail)

    async def prune(self) -> None:
        """Delete what is older than the configuration keeps."""
        bases = {open_.base.version for open_ in self._rounds}
        await prune(self._facts, self._models, self._config, bases)

    async def save_time(self, *, less: float = 0.0) -> None:
        """Note the seconds that the open rounds have left, minus `less` that are as good as gone."""
        for open_ in self._rounds:
            round_ = open_.state.round
            if round_ is None or round_.phase not in (Phase.WAITING, Phase.TRAINING):
                continue
            left = max(0.0, rd.deadline(round_) - time.monotonic() - less)
            open_.row = replace(open_.row, seconds_left=left)
            with suppress(StorageError):  # the disk is full, or somebody else holds the database: the next note will do
                await self._facts.db(self._facts.store.save_seconds_left, open_.row.round, round_.phase, left)

    async def _perform(self, open_: OpenRound, effect: Effect) -> None:
        match effect:
            case MakeModel():
                await self._make_model(open_)
            case TakeStep(inner):
                try:
                    await open_.kind.perform(inner)
                except StorageFailed:
                    await self._wait_for_disk(open_)
            case _:
                await self._settle(open_, effect)

    async def _settle(self, open_: OpenRound, effect: Effect) -> None:
        """Do what ends a phase, between two commits of updates."""
        rounds = self._rounds
        async with open_.settling:
            if rd.due(open_.state, time.monotonic()) != effect:
                return  # an update was accepted, or the round was stopped, just before
            match effect:
                case Start(clients):
                    await self._start(open_, clients)
                case Aggregate(stragglers):
                    open_.stragglers = stragglers
                    rounds.handle(open_, Closed())
                case Abandon(reason, why):
                    open_.failures[:0] = [why] if why else []
                    rounds.handle(open_, Abandoned(reason))
        if isinstance(effect, Start) and open_.started:
            await self._facts.keep(self.prune)  # now, while the clients train: nobody waits for it
        elif isinstance(effect, Aggregate):
            self._tell_missing(open_)

    async def _start(self, open_: OpenRound, clients: frozenset[str]) -> None:
        row = replace(open_.row, phase=Phase.TRAINING, selected=tuple(sorted(clients)), seconds_left=None)
        try:
            await open_.kind.start()
            await self._facts.db(self._facts.store.update_round, row)
        except StorageFailed:
            return  # it is due again, and waits for the disk where a stop need not wait
        open_.row, open_.started = row, time.monotonic()
        self._rounds.handle(open_, Started(clients, open_.kind.steps(clients)))
        self._rounds.gather(open_)
        self._dispatch.train_all(open_, clients)
        text = f"{open_.title} trains on {len(clients)} clients"
        self._rounds.tell(open_, "round_started", text)

    def _tell_missing(self, open_: OpenRound) -> None:
        """Tell whom a round that has closed goes on without."""
        if open_.missing:
            log.warning("round %d ends without %s", open_.row.round, ", ".join(open_.missing))
        if open_.stragglers:
            self._metrics.stragglers.inc(len(open_.stragglers))
            names, factor = ", ".join(sorted(open_.stragglers)), open_.job.straggler_factor
            text = f"{open_.title} ends without {names}: {factor:g} times the median time has passed"
            self._rounds.tell(open_, "round_stragglers", text)

    async def _make_model(self, open_: OpenRound) -> None:
        """Make and publish the next model, or abandon the round if that cannot be done.

        What can be mended, or waited for, makes it due again.
        """
        if open_.stop_reason:
            return self._rounds.handle(open_, Abandoned(open_.stop_reason))
        open_.making = True
        try:
            with self._metrics.aggregate_seconds.time():
                model, ended = await publish(self._facts, self._models, self._privacy, open_)
        except StorageFailed as error:
            log.warning("the model of round %d waits for the disk: %s", open_.row.round, error)
            open_.making = False
            if not open_.stop_reason:
                await self._wait_for_disk(open_)
        except DamagedUpdates as error:
            await self._facts.keep(self._go_on_without, open_, error)
        except open_.kind.recoverable as error:
            log.error("round %d: %s", open_.row.round, error)
            open_.failures.insert(0, str(error))
            if not await self._facts.keep(open_.kind.recover, error):
                self._rounds.handle(open_, Abandoned(error.reason))
        except (RuleError, SeamError) as error:
            log.error("round %d makes no model: %s", open_.row.round, error, exc_info=error.__cause__)
            open_.failures.insert(0, str(error))
            self._rounds.handle(open_, Abandoned(error.reason))
        except (StorageError, CodecError, OptimizerError, RuntimeError) as error:  # torch raises RuntimeErrors
            log.error(
                "round %d makes no model: %s", open_.row.round, error, exc_info=not isinstance(error, StorageError)
            )
            if isinstance(error, DamagedModel):
                self._note_damage(open_, error)
            self._rounds.handle(open_, Abandoned(getattr(error, "reason", "bad_optimizer")))
        else:
            self._publish(open_, model, ended)
        finally:
            open_.making = False

    def _publish(self, open_: OpenRound, model: ModelRow, ended: RoundRow) -> None:
        """Tell everybody of the new model, which is durable, and let clients evaluate it."""
        rounds = self._rounds
        open_.row, open_.made, rounds.latest = ended, model, model
        self._metrics.guarded(ended.stats)
        self._models.versions.remember(model)
        evaluators = self._sessions.here(open_.job.clients) if open_.job.evaluate else []
        rounds.handle(open_, Published(frozenset(evaluators)))
        self._end_training(open_)
        for client in evaluators:
            self._dispatch.evaluate(open_, model, client)
        text = f"{open_.title} published model {model.version} in {ended.stats['seconds']:.2f} s"
        rounds.tell(open_, "round_published", text)

    async def _wait_for_disk(self, open_: OpenRound) -> None:
        """Return when the disk takes what is to be kept, or when the phase has ended."""
        storage, phase = self._facts.storage, open_.phase
        while storage.fault and open_.phase is phase:
            open_.changed.clear()
            await storage.works_or(open_.changed)

    async def _go_on_without(self, open_: OpenRound, error: DamagedUpdates) -> None:
        """Forget accepted updates that are damaged. The round ends without them, or is abandoned for want of them."""
        rounds = self._rounds
        can_publish = await open_.kind.lost(frozenset(error.clients), error.reason)
        await self._facts.db(self._facts.drop_updates, open_.row.round, sorted(error.clients))
        for client, text in error.clients.items():
            del open_.accepted[client]
            rounds.handle(open_, Lost(client))
            text = f"{text}: what it had learned is lost"
            open_.failures.append(text)
            self._rounds.note(open_, "blob_damaged", text, client, clients=True)
        round_ = open_.state.round
        few = round_ is not None and len(round_.delivered) < round_.rules.min_to_aggregate
        if few or not can_publish:
            rounds.handle(open_, Abandoned(error.reason))

    def _note_damage(self, open_: OpenRound, error: DamagedModel) -> None:
        open_.failures.insert(0, error.detail)
        open_.retryable = False
        self._rounds.tell(open_, "blob_damaged", error.detail)

    async def _finish(self, open_: OpenRound) -> RoundResult:
        rounds, round_ = self._rounds, open_.state.round
        if round_ is not None and round_.phase is Phase.ABANDONED:
            outcome = await self._finish_abandoned(open_, round_)
        else:
            outcome = RoundResult(published=True)
            if open_.made is not None:
                await self._finish_evaluation(open_, open_.made)
        await self._facts.db(self._facts.blobs.drop_partials, f"{open_.row.round}-")
        await self._privacy.ended(open_, rounds)
        rounds.handle(open_, Finished())
        rounds.end(open_)
        return outcome

    async def _finish_abandoned(self, open_: OpenRound, round_: Round) -> RoundResult:
        facts = self._facts
        open_.row = open_.ended(Phase.ABANDONED, reason=round_.reason)
        await facts.keep(facts.db, facts.store.update_round, open_.row)
        self._end_training(open_)
        away = () if open_.row.selected else await facts.db(facts.store.update_counts)
        reason = why_abandoned(open_, open_.state, away, self._config.listen)
        self._rounds.tell(open_, "round_abandoned", f"{open_.title} was abandoned: {reason}")
        return RoundResult(published=False, reason=reason, retryable=open_.retryable)

    async def _finish_evaluation(self, open_: OpenRound, model: ModelRow) -> None:
        stats, summed = await evaluation(self._facts, self._models, self._test_set, open_, model)
        self._metrics.evaluated(stats)
        open_.row = replace(open_.row, stats=stats)
        await self._facts.keep(self._facts.db, self._facts.store.save_evaluation, open_.row)
        figure = ""
        if summed is not None and summed.total:
            known = summed.accuracy is not None
            figure = f": accuracy {summed.accuracy:.4f}" if known else f": loss {summed.loss:.4f}"
        rule = open_.job.best_by
        if rule and not result_of(stats["metrics"], rule):
            figure += f"; it has no {rule.split()[1]}, so best_by cannot choose its model"
        figure += "".join(f"; {warning}" for warning in stats.get("warnings", ()))
        self._rounds.tell(open_, "round_evaluated", f"{open_.title} is evaluated{figure}")

    def _end_training(self, open_: OpenRound) -> None:
        """Tell the workers of the group, and the clients that still train, that the round takes no more updates."""
        self._rounds.group_event(open_, gr.GroupClosed(open_.row.reason))
        self._dispatch.ended(open_, self._rounds.latest)

    def _tell_progress(self, open_: OpenRound, progress: RoundProgress, now: float) -> float:
        """Tell what an open barrier waits for, or log what a round does. Returns seconds until there may be more."""
        text, seconds = progress.news(open_.state, open_.title, now)
        if text and open_.phase is Phase.WAITING:
            self._rounds.tell(open_, "round_waits", text)
        elif text:  # the journal has its updates one by one
            log.info("%s", text)
        return seconds


_PERIOD = 1.0
"""Seconds between two notes of the time. Each says what will be left at the next one: a kill gives no notice."""


async def keep_time(runner: RoundRunner) -> None:
    """Keep noting how long the open rounds may still take, until cancelled: a restart gives it no more time."""
    while True:
        await asyncio.sleep(_PERIOD)
        await runner.save_time(less=_PERIOD)
