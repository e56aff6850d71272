"""The page's facts, in pieces small enough to send often.

They are those that flctl is told, and may be sent four times a second.
"""

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedring.server.operator.privacy_spent import PrivacySpent
from fedring.server.operator.report import event_message
from fedring.server.operator.summaries import (
    Summary,
    client_names,
    client_summaries,
    event_summary,
    group_summary,
    job_settings,
    job_summary,
    lead_summary,
    model_summary,
    open_round_summary,
    privacy_summary,
    round_summary,
    wait_summary,
)
from fedring.server.round.report import open_message, round_message
from fedring.server.running.rounds import Rounds
from fedring.server.sessions.sessions import Session, Sessions
from fedring.server.state.facts import Facts
from fedring.server.state.journal import Journal, rfc3339
from fedring.server.state.lead import absent
from fedring.server.state.rows import EvaluationRow, EventRow, JobRow, RoundRow
from fedring.v1 import control_pb2 as pb

MOST_JOBS, MOST_MODELS, MOST_EVENTS, MOST_ROUNDS = 50, 10, 50, 1000
MOST_STORED_EVENTS, MOST_OPEN = 1000, 50
CHUNK = 10
"""Rounds that are read at once. Those of large fleets are long, and uploads wait for the same thread."""
STORE_SECONDS = 2.0
"""Seconds after which the store is read again; an event has it read sooner."""
_ENDED = ("published", "abandoned")


@dataclass(slots=True)
class _Stored:
    """The facts that were last read from the store."""

    at: float = 0.0
    event: int = -1  # the id of the newest event at that time
    jobs: list[JobRow] = field(default_factory=list)
    updates: dict[str, int] = field(default_factory=dict)
    models: list[Summary] = field(default_factory=list)
    last: RoundRow | None = None
    events: list[EventRow] = field(default_factory=list)  # from before this process


class View:
    """The facts of the page, for `fedring.web`."""

    def __init__(
        self, rounds: Rounds, sessions: Sessions, journal: Journal, facts: Facts, version: str, spent: PrivacySpent
    ) -> None:
        self._rounds, self._sessions, self._journal = rounds, sessions, journal
        self._facts, self._store = facts, facts.store
        self._version, self._spent = version, spent
        self._began = time.time()
        self._stored = _Stored()
        self._evaluations: dict[int, EvaluationRow | None] = {}  # of older models
        self._reading = asyncio.Lock()

    async def state(self) -> dict[str, Any]:
        """Return how things are now, in parts that change at different times."""
        stored, now = await self._read(), self._rounds
        latest, running = now.latest, now.newest
        current = open_message(running) or self._last_round(stored)
        job = next((row for row in stored.jobs if current is not None and row.job_id == current.job_id), None)
        sessions = list(self._sessions)
        names = client_names(sessions, stored.updates, running.state.round if running else None)
        return {
            "server": {
                "version": self._version,
                "run_id": self._store.run_id,
                "started_at": rfc3339(self._began),
                "clients": len(sessions),
                "known": len(names),
                "watching": sum(session.matched for session in sessions),
                "model_version": latest.version if latest else 0,
                "leadership": lead_summary(self._facts.lead),
            },
            "round": round_summary(current) if current else None,
            "waits_for": wait_summary(running),
            "rounds": [open_round_summary(each) for each in list(now)[-MOST_OPEN:]],
            "clients": self._clients(names, sessions, stored),
            "group": group_summary(
                running.group if running and running.group else now.groups.newest, self._sessions, job
            )
            if job
            else None,
            "jobs": [job_summary(row) for row in stored.jobs],
            "models": stored.models,
            "privacy": privacy_summary(self._spent.now),
            "events": self._recent(stored),
        }

    async def clients(self, search: str, skip: int) -> dict[str, Any]:
        """Return some of the clients that a search finds.

        The answer has their total, too.

        Args:
            search: a part of the name, software or address of a client.
            skip: how many of them to leave out.
        """
        stored, running, sessions = await self._read(), self._rounds.newest, list(self._sessions)
        round_ = running.state.round if running else None
        names = client_names(sessions, stored.updates, round_, search.lower())
        return {"clients": self._clients(names[skip:], sessions, stored), "total": len(names)}

    def _clients(self, names: Sequence[str], sessions: Iterable[Session], stored: _Stored) -> list[Summary]:
        running = self._rounds.newest
        round_, shown = (running.state.round, running.row.job_id) if running else (None, 0)
        held = self._rounds.turns.jobs
        state = absent(self._facts.lead)
        return client_summaries(sessions, stored.updates, round_, held, shown_job=shown, names=names, absent_as=state)

    async def rounds(self, job_id: int, after: int, *, clients: bool = False) -> dict[str, Any]:
        """Return a job with its ended rounds above `after`, oldest first.

        The job is given by its id; 0 = the newest.

        Args:
            job_id: The job.
            after: The number of a round.
            clients: Whether each round has the parts of its first clients.
        """
        if not job_id:
            newest = await self._facts.db(self._store.jobs.newest, 1)
            job_id = newest[0].job_id if newest else 0
        job = await self._facts.db(self._store.jobs.get, job_id)
        rounds: list[Summary] = []
        async with self._reading:  # one at a time: a request for much holds up only others like it
            limit, below = self._first_chunk(after), 0
            while job is not None and len(rounds) < MOST_ROUNDS:
                chunk = await self._facts.db(self._read_rounds, limit, job_id, below, clients)
                rounds += chunk
                if len(chunk) < limit or chunk[-1]["round"] <= after + 1:
                    break
                limit, below = CHUNK, chunk[-1]["round"]
        ended = [row for row in reversed(rounds) if row["round"] > after and row["phase"] in _ENDED]
        return {"job": job_summary(job) | job_settings(job.spec) if job else None, "rounds": ended}

    async def events(self, after: int) -> dict[str, Any]:
        """Return the events above `after`, oldest first; 0 = the newest ones."""
        if not after:
            return {"events": self._recent(await self._read())}
        stored = await self._facts.db(self._store.events.after, after, MOST_STORED_EVENTS)
        events = {row.id: event_summary(event_message(row, None)) for row in stored}
        events |= {event.id: event_summary(event) for event in self._journal.recent(after)}
        return {"events": [events[number] for number in sorted(events)][:MOST_STORED_EVENTS]}

    async def _read(self) -> _Stored:
        """Return the store's facts, as of the last event or moments ago."""
        stored, newest = self._stored, self._journal.last_id
        if stored.event != newest or time.monotonic() - stored.at > STORE_SECONDS:
            stored = await self._facts.db(self._read_store, newest)
            self._stored = stored
        return stored

    def _read_rounds(self, limit: int, job_id: int, below: int, clients: bool) -> list[Summary]:
        return [
            round_summary(round_message(row), clients=clients)
            for row in self._store.rounds.newest(limit, job_id, below)
        ]

    def _read_store(self, newest: int) -> _Stored:
        store, first = self._store, self._stored.event < 0
        return _Stored(
            at=time.monotonic(),
            event=newest,
            jobs=store.jobs.newest(MOST_JOBS),
            updates=store.updates.counts(),
            models=self._read_models(),
            last=next(iter(store.rounds.newest(1)), None) if first else self._stored.last,
            events=store.events.newest(MOST_EVENTS) if first else self._stored.events,
        )

    def _read_models(self) -> list[Summary]:
        rows, known, best = (
            self._store.models.newest(MOST_MODELS),
            self._evaluations,
            self._store.models.best_versions(),
        )
        for row in rows[1:]:  # these are no longer evaluated
            if row.version not in known:
                known[row.version] = self._store.evaluations.total(row.version)
        self._evaluations = {row.version: known[row.version] for row in rows[1:]}
        newest = {row.version: self._store.evaluations.total(row.version) for row in rows[:1]}
        evaluations = self._evaluations | newest
        return [
            model_summary(row, evaluations[row.version], self._store.rounds.get(row.round), best=row.version in best)
            for row in rows
        ]

    def _last_round(self, stored: _Stored) -> pb.Round | None:
        row = self._rounds.last or stored.last
        return round_message(row) if row else None

    def _first_chunk(self, after: int) -> int:
        """Return how many rounds to read at first, up to CHUNK.

        They are as many as there can be above `after`.
        """
        newest = self._rounds.newest.row if self._rounds.newest else self._rounds.last
        return min(CHUNK, max(newest.round - after, 1)) if after and newest else CHUNK

    def _recent(self, stored: _Stored) -> list[Summary]:
        """Return the newest events.

        Some are from before this process if it has not seen enough.
        """
        told = {row.id: event_summary(event_message(row, None)) for row in stored.events}
        told |= {event.id: event_summary(event) for event in self._journal.recent()[-MOST_EVENTS:]}
        return [told[number] for number in sorted(told)][-MOST_EVENTS:]
