"""Asynchronous rounds, as a kind of round.

A client's command is durable before the client knows it, with its deadline and the model that it begins with. It names
the round that was open when it was given, and each client gets at most one of a round. So an answer is known by that
number and its client, wherever it counts, and one that comes again is found.
"""

import time
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

from fedring.daemon.metrics import Registry
from fedring.server.asynchronous.phases import (
    ASYNCHRONOUS,
    Command,
    Deadlines,
    Expire,
    Given,
    Over,
    asynchronous_rules,
)
from fedring.server.round.dispatch import Dispatch
from fedring.server.round.events import Enlisted, Failed, Phase, RoundRules, Stepped, Steps
from fedring.server.round.open_round import KindMaker, OpenRound, RoundKind
from fedring.server.running.opening import RECOVERY_SECONDS
from fedring.server.running.publishing import wait_for_disk
from fedring.server.running.rounds import Rounds
from fedring.server.sessions.sessions import Sessions
from fedring.server.state.facts import Facts
from fedring.server.state.failures import StorageFailed
from fedring.server.state.rows import CommandRow, RoundRow
from fedring.train.jobs.asynchronous_table import Asynchronous
from fedring.train.jobs.override_table import overrides_of
from fedring.v1 import federation_pb2 as pb

_AGES = (0, 1, 2, 3, 5, 10, 20, 50)
_REASONS = ("deadline", "too_stale")


class AsynchronousMetrics:
    """Counts commands and the ages of updates."""

    def __init__(self, registry: Registry) -> None:
        text = "Versions by which the model that an accepted update of an asynchronous job began with is older."
        self.staleness = registry.histogram("fl_server_update_staleness_versions", text, _AGES)
        text = "Clients that work on commands of asynchronous jobs."
        self.at_work = registry.gauge("fl_server_commands_at_work", text)
        text = "Commands of asynchronous jobs that ended without an update."
        self.over = registry.counter("fl_server_commands_over_total", text, reason=_REASONS)


class AsynchronousRounds(KindMaker):
    """The kind of rounds that wait for nobody."""

    @classmethod
    def declare(cls, registry: Registry) -> AsynchronousMetrics:
        """See KindMaker.declare."""
        return AsynchronousMetrics(registry)

    def __init__(
        self, rounds: Rounds, facts: Facts, sessions: Sessions, metrics: AsynchronousMetrics, authority: Path | None
    ) -> None:
        self._rounds, self._facts, self._sessions, self._metrics = rounds, facts, sessions, metrics
        metrics.at_work.set_function(lambda: sum(len(told.outstanding) for told in (*rounds, *rounds.carried.of())))

    def kind_of(self, open_: OpenRound) -> RoundKind | None:
        """Return the course of an asynchronous round."""
        table = open_.job.asynchronous
        parts = (self._rounds, self._facts, self._sessions, self._metrics)
        return None if table is None else AsynchronousRound(open_, table, *parts)


class AsynchronousRound(RoundKind):
    """The course of one buffer."""

    phases = ASYNCHRONOUS
    lasting = True

    def __init__(
        self,
        open_: OpenRound,
        table: Asynchronous,
        rounds: Rounds,
        facts: Facts,
        sessions: Sessions,
        metrics: AsynchronousMetrics,
    ) -> None:
        super().__init__(open_)
        self._table, self._rounds, self._facts, self._sessions = table, rounds, facts, sessions
        self._metrics = metrics
        self._dispatch = Dispatch(sessions)

    async def prepare(self) -> None:
        """Take over the clients that still work on commands of earlier rounds."""
        open_, job_id = self.open, self.open.row.job_id
        job = await self._facts.db(self._facts.store.jobs.get, job_id)
        open_.published = job.rounds_done if job is not None else 0
        if any(row.job_id == job_id for row in self._rounds.interrupted.rows.values()):
            await self._load()
        # The round before may have waited long for somebody to come, but no time passes while the storage fails.
        now = -inf if self._facts.storage.fault else time.monotonic()
        for told in self._rounds.carried.of(job_id):
            stale = open_.published - told.published > self._table.max_staleness
            for client, until in sorted(told.outstanding.items()):
                if stale or now >= until:
                    self._end(told, client, "too_stale" if stale else "deadline")
        carried = self._rounds.carried.of(job_id)
        open_.carried = frozenset(client for told in carried for client in told.outstanding)
        open_.absent = {name: member for told in carried for name, member in told.absent.items()}
        # A restart while the round waits would take the others for clients that go on.
        await self._facts.db(self._facts.store.commands.give, job_id, (), self.going_on)

    async def _load(self) -> None:
        """Read the commands of before a restart.

        One of an earlier epoch is not read: a restored server does not know what its clients were told since. A round
        takes only those of its clients, and of earlier rounds before it begins: any other one was not told of its
        command before the kill, or the command was over.
        """
        open_, store = self.open, self._facts.store
        by_round: dict[int, list[CommandRow]] = defaultdict(list)
        for row in await self._facts.db(store.commands.of_job, open_.row.job_id):
            command = pb.TrainCmd.FromString(row.command)
            done = await self._facts.db(store.updates.accepted_name, row.round, row.client_id)
            carried = open_.row.phase == Phase.WAITING and row.round != open_.row.round
            asked = carried or row.client_id in open_.row.selected
            if command.epoch == store.epoch and asked and not done:
                by_round[row.round].append(row)
        for number, rows in sorted(by_round.items()):
            if number != open_.row.round:
                await self._carry(rows)
            else:
                open_.outstanding.update(_ends(open_, rows))

    async def _carry(self, rows: list[CommandRow]) -> None:
        """Take up the commands of one round that had ended."""
        first, open_ = rows[0], self.open
        base = await self._facts.db(self._facts.store.models.get, first.base_version)
        if base is None:
            return
        overrides = {row.client_id: row.overrides for row in rows}
        ended = RoundRow(
            first.round, first.job_id, first.job_round, Phase.PUBLISHED, 0.0, base.version, overrides=overrides
        )
        told = OpenRound(ended, open_.job, pb.TrainCmd.FromString(first.command), base)
        parts = (self._rounds, self._facts, self._sessions, self._metrics)
        told.kind = AsynchronousRound(told, self._table, *parts)
        told.published = first.published
        told.outstanding.update(_ends(open_, rows))
        self._rounds.carried.keep(told)
        for session in self._sessions:
            if session.matched and session.client_id in told.outstanding:
                self._dispatch.train(told, session.client_id)

    def rules(self, rules: RoundRules) -> RoundRules:
        """See RoundKind.rules."""
        return asynchronous_rules(rules, self._table, self.open.carried)

    async def start(self, row: RoundRow) -> None:
        """Store the commands of the clients that the round begins with."""
        await self._give(row, set(row.selected) - self.open.carried)

    async def _give(self, row: RoundRow, clients: Iterable[str]) -> None:
        open_, command = self.open, self.open.command.SerializeToString()
        until = time.time() + open_.job.deadline_seconds
        common = (row.round, row.job_round, open_.published, row.base_version, until)
        rows = [
            CommandRow(row.job_id, client, *common, row.overrides.get(client, []), command)
            for client in sorted(clients)
        ]
        await self._facts.db(self._facts.store.commands.give, row.job_id, rows, self.going_on)

    def steps(self, clients: frozenset[str]) -> Steps:
        """Return the deadlines of all commands.

        That of a client that has failed since the round was opened is over: the round still counts on it.
        """
        self.open.outstanding.update(_until(self.open, clients))
        failed = self.open.carried.difference(self.going_on)
        return Deadlines({**self._deadlines().until, **dict.fromkeys(failed, -inf)})

    async def restore(self) -> Steps:
        """Return the deadlines of the commands that a restart has found."""
        return self._deadlines()

    def _deadlines(self) -> Deadlines:
        each = (self.open, *self._rounds.carried.of(self.open.row.job_id))
        return Deadlines({client: at for told in each for client, at in told.outstanding.items()})

    def resumed(self) -> None:
        """Wait for no client whose command was over before the restart."""
        open_ = self.open
        going_on = {*open_.outstanding, *self.going_on, *open_.accepted}
        for client in sorted(set(open_.row.selected) - going_on):
            self._rounds.handle(open_, Failed(client, open_.row.round))

    async def perform(self, effect: object) -> None:
        """Give further commands, or end those whose time is over."""
        match effect:
            case Command(clients):
                await self._command(clients)
            case Expire() if self._facts.storage.fault:
                await wait_for_disk(self._facts, self.open)  # nobody can answer meanwhile
            case Expire(clients):
                await self._facts.db(self._facts.store.commands.drop, self.open.row.job_id, clients)
                for client in sorted(clients):
                    self._rounds.handle(self.open, Failed(client, self.open.row.round))
                    for told in (self.open, *self._rounds.carried.of(self.open.row.job_id)):
                        if client in told.outstanding:
                            self._end(told, client, "deadline")
                    self._rounds.handle(self.open, Stepped(Over(client)))

    async def _command(self, clients: frozenset[str]) -> None:
        open_, rounds = self.open, self._rounds
        async with open_.settling:
            members, before = open_.state.members, open_.drawn
            new = {
                name: members[name].labels for name in clients if name in members and rounds.turns.has_room(open_, name)
            }
            if open_.phase is not Phase.TRAINING or not new:
                return
            overrides = {**open_.row.overrides, **overrides_of(new, open_.job.override)}
            row = replace(open_.row, selected=tuple(sorted({*open_.row.selected, *new})), overrides=overrides)
            rounds.turns.draw(open_, before | new.keys())
            try:
                await self._give(row, new)
                await self._facts.db(self._facts.store.rounds.replace, row)
            except StorageFailed:
                rounds.turns.draw(open_, before)
                raise
            open_.row = row
            open_.outstanding.update(until := _until(open_, new))
            for client in sorted(new):
                rounds.handle(open_, Enlisted(client))
            rounds.handle(open_, Stepped(Given(until)))
        self._dispatch.train_all(open_, new, open_.job.deadline_seconds)

    def _end(self, told: OpenRound, client: str, reason: str) -> None:
        """End a client's command without an answer, and tell it."""
        self._rounds.carried.release(told, client)
        self._metrics.over.labels(reason).inc()
        self._dispatch.over(replace(told.row, reason=reason), self._rounds.latest, client)
        text = f"the command of {client} from version {told.base.version} is over without an update: {reason}"
        self._rounds.journal.note(self.open, "command_over", text, client)

    def answered(self, told: OpenRound, client: str) -> None:
        """See RoundKind.answered."""
        self._rounds.carried.release(told, client)
        if client in self.open.accepted:
            self._metrics.staleness.observe(self.open.accepted[client].staleness)
        if self.open.phase is Phase.TRAINING:
            self._rounds.handle(self.open, Stepped(Over(client)))

    @property
    def room(self) -> float:
        """See RoundKind.room."""
        return self._table.buffer - len(self.open.accepted)

    @property
    def going_on(self) -> Collection[str]:
        """See RoundKind.going_on."""
        each = (self.open, *self._rounds.carried.of(self.open.row.job_id))
        return {client for told in each for client in told.outstanding}

    @property
    def expected(self) -> int:
        """See RoundKind.expected. A smaller buffer is divided by the same number."""
        return self._table.buffer

    def figures(self) -> dict[str, Any]:
        """See RoundKind.figures."""
        staleness = {client: row.staleness for client, row in sorted(self.open.accepted.items())}
        table, at_work = self._table, len(self.going_on)
        figures = {"buffer": table.buffer, "concurrency": table.concurrency, "at_work": at_work, "staleness": staleness}
        return {"asynchronous": figures}

    @property
    def evaluates(self) -> bool:
        """See RoundKind.evaluates."""
        return self.open.row.job_round == self.open.job.rounds or not (
            (self.open.published + 1) % self._table.evaluate_every
        )


def _ends(open_: OpenRound, rows: Iterable[CommandRow]) -> dict[str, float]:
    """Return the monotonic ends of commands, with time to come back."""
    most, wall, now = open_.job.deadline_seconds, time.time(), time.monotonic()
    return {row.client_id: now + min(most, max(RECOVERY_SECONDS, row.until - wall)) for row in rows}


def _until(open_: OpenRound, clients: Iterable[str]) -> dict[str, float]:
    """Return the monotonic ends of commands that are given now."""
    return dict.fromkeys(clients, time.monotonic() + open_.job.deadline_seconds)
