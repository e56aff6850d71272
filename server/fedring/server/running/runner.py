"""The runner of rounds, which performs the effects due by the machine.

One task performs the effects of one round, one after the other. Whatever must survive is in the store before anybody is
told of it.
"""

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf

from fedring.daemon.wording import counted
from fedring.server.round import machine as rd
from fedring.server.round.dispatch import Dispatch
from fedring.server.round.events import (
    Abandon,
    Abandoned,
    Aggregate,
    Closed,
    Effect,
    Finish,
    Finished,
    Held,
    MakeModel,
    Phase,
    Round,
    Start,
    Started,
    TakeStep,
)
from fedring.server.round.metrics import RoundMetrics
from fedring.server.round.open_round import OpenRound
from fedring.server.round.progress import RoundProgress, why_abandoned
from fedring.server.running.keeping import Keeper
from fedring.server.running.publishing import Publisher, wait_for_disk
from fedring.server.running.rounds import Rounds
from fedring.server.sessions.sessions import Sessions
from fedring.server.state.facts import Facts
from fedring.server.state.failures import StorageFailed
from fedring.server.state.rows import NOT_APPROVED
from fedring.train.jobs.override_table import overrides_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RoundResult:
    """The result of a round."""

    published: bool
    reason: str = ""  # why it was abandoned, for people
    retryable: bool = True  # False if the job's next rounds would end in the same way
    unapproved: bool = False  # whether clients have refused it because their sites have not approved the job yet


class RoundRunner:
    """Runs open rounds to their ends, each in its own task."""

    def __init__(
        self,
        rounds: Rounds,
        facts: Facts,
        publisher: Publisher,
        keeper: Keeper,
        sessions: Sessions,
        metrics: RoundMetrics,
        listen: str,
    ) -> None:
        self._rounds, self._facts, self._publisher, self._keeper = rounds, facts, publisher, keeper
        self._metrics, self._listen = metrics, listen
        self._dispatch = Dispatch(sessions)

    async def run(self, open_: OpenRound) -> RoundResult:
        """Perform the due effects until the round has ended."""
        rounds, progress = self._rounds, RoundProgress()
        while True:
            open_.changed.clear()
            now = time.monotonic()
            self._note_hold(open_, now)
            effect = rd.due(open_.state, now)
            if self._facts.storage.fault and isinstance(effect, Start | Aggregate | Abandon):
                # What clients offer is refused meanwhile.
                await wait_for_disk(self._facts, open_)
            elif isinstance(effect, Finish):
                return await self._finish(open_)
            elif effect is not None:
                await self._perform(open_, effect)
            else:
                rounds.groups.expect(open_)
                wait = min(rd.wake_at(open_.state, now) - now, self._tell_progress(open_, progress, now))
                with suppress(TimeoutError):  # a deadline is due
                    async with asyncio.timeout(None if wait == inf else max(wait, 0.001)):
                        await open_.changed.wait()

    def _note_hold(self, open_: OpenRound, now: float) -> None:
        """Note the time of a wait for a turn, or for people.

        If a client goes for a moment, the round waits for it as long as it would have without that.
        """
        held, since = rd.is_held(open_.state), open_.held_since
        if held == bool(since):
            return
        open_.held_since = now if held else 0.0
        if not held and open_.phase is Phase.WAITING:
            self._rounds.handle(open_, Held(now - since))

    async def _perform(self, open_: OpenRound, effect: Effect) -> None:
        match effect:
            case MakeModel():
                await self._publisher.make(open_)
            case TakeStep(inner):
                try:
                    await open_.kind.perform(inner)
                except StorageFailed:
                    await wait_for_disk(self._facts, open_)
            case _:
                await self._settle(open_, effect)

    async def _settle(self, open_: OpenRound, effect: Effect) -> None:
        """End a phase, between two commits of updates."""
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
                    # If all workers fail at once, too few are left before anybody has looked at their group.
                    failure = open_.group.failure if open_.group is not None else ""
                    rounds.handle(open_, Abandoned(failure or reason))
        if isinstance(effect, Start) and open_.started:
            await self._facts.keep(self._keeper.prune_now_and_then)  # while the clients train: nobody waits for it
        elif isinstance(effect, Aggregate):
            self._tell_missing(open_)

    async def _start(self, open_: OpenRound, clients: frozenset[str]) -> None:
        labels = {client: open_.state.members[client].labels for client in clients}
        # Kept with the round: whatever a client calls itself later, it is told the same again.
        overrides = overrides_of(labels, open_.job.override)
        selected = tuple(sorted(clients | open_.carried))
        row = replace(open_.row, phase=Phase.TRAINING, selected=selected, seconds_left=None, overrides=overrides)
        self._rounds.turns.draw(open_, clients)  # before anything is waited for: another round could draw them, too
        try:
            await open_.kind.start(row)
            await self._facts.db(self._facts.store.rounds.replace, row)
        except StorageFailed:
            self._rounds.turns.draw(open_, ())
            return  # it is due again, and waits for the disk where a stop need not wait
        open_.row, open_.started = row, time.monotonic()
        self._rounds.handle(open_, Started(frozenset(selected), open_.kind.steps(clients)))
        self._rounds.groups.gather(open_)
        self._dispatch.train_all(open_, clients)
        text = f"{open_.title} trains on {counted(len(selected), 'client')}"
        self._rounds.journal.tell(open_, "round_started", text)

    def _tell_missing(self, open_: OpenRound) -> None:
        """Tell whom a round that has closed goes on without."""
        if open_.missing:
            log.warning("round %d ends without %s", open_.row.round, ", ".join(open_.missing))
        if open_.stragglers:
            self._metrics.stragglers.inc(len(open_.stragglers))
            names, count = ", ".join(sorted(open_.stragglers)), len(open_.accepted)
            why = f"{open_.job.straggler_factor:g} times the median time has passed"
            if open_.state.round is not None and count >= rd.updates_needed(open_.state.round):
                why = f"the {counted(count, 'update')} that it needs are here"
            text = f"{open_.title} ends without {names}: {why}"
            self._rounds.journal.tell(open_, "round_stragglers", text)

    async def _finish(self, open_: OpenRound) -> RoundResult:
        rounds, round_ = self._rounds, open_.state.round
        if round_ is not None and round_.phase is Phase.ABANDONED:
            outcome = await self._finish_abandoned(open_, round_)
        else:
            outcome = RoundResult(published=True)
            if open_.made is not None:
                await self._publisher.evaluated(open_, open_.made)
        if not open_.outstanding:
            rounds.carried.over.add(open_.row.round)
        await drop_partials(rounds, self._facts)
        await self._publisher.forget(open_)
        rounds.carried.note_absent(open_)
        rounds.handle(open_, Finished())
        rounds.end(open_)
        return outcome

    async def _finish_abandoned(self, open_: OpenRound, round_: Round) -> RoundResult:
        facts = self._facts
        # Too few for the round, or for what its kind asks; and a pipeline cannot begin without any of its clients.
        asked = open_.asked and round_.reason.startswith(("too_few", NOT_APPROVED))
        open_.row = open_.ended(Phase.ABANDONED, reason=NOT_APPROVED if asked else round_.reason)
        await facts.keep(facts.db, facts.store.rounds.replace, open_.row)
        self._publisher.end_training(open_)
        away = () if open_.row.selected else await facts.keep(facts.db, facts.store.updates.counts)
        reason = why_abandoned(open_, open_.state, away, self._listen)
        self._rounds.journal.tell(open_, "round_abandoned", f"{open_.title} was abandoned: {reason}")
        return RoundResult(published=False, reason=reason, retryable=open_.retryable, unapproved=asked)

    def _tell_progress(self, open_: OpenRound, progress: RoundProgress, now: float) -> float:
        """Tell operators about an open barrier, or log the round's progress.

        Returns the seconds until there may be more to tell.
        """
        text, seconds = progress.news(open_.state, open_.title, now)
        if text and open_.phase is Phase.WAITING:
            self._rounds.journal.tell(open_, "round_waits", text)
        elif text:  # the journal has its updates one by one
            log.info("%s", text)
        return seconds


async def drop_partials(rounds: Rounds, facts: Facts) -> None:
    """Delete the partial uploads for commands that are over."""
    while rounds.carried.over:
        await facts.db(facts.blobs.drop_partials, f"{rounds.carried.over.pop()}-")
