"""Lists of jobs, rounds, models and events for operators."""

from fedring.privacy.account import NoAccountant
from fedring.rpc.errors import BadRequest, NoEpsilon
from fedring.server.operator.privacy_report import privacy_message
from fedring.server.operator.report import event_message, job_message, model_message
from fedring.server.round.report import round_message
from fedring.server.state.facts import Facts
from fedring.server.state.rows import JobRow
from fedring.v1 import control_pb2 as pb

MOST_ROWS = 1000
_ALL = 1_000_000_000
PAGE_BYTES = 1 << 20
"""Bytes of rounds or jobs after which an answer ends."""
_ROUNDS_AT_ONCE = 32
_BYTES_AT_ONCE = PAGE_BYTES // 32
"""Bytes of rounds to read in one transaction, as far as the rounds before let one guess."""
MAX_ID = 2**63 - 1
"""The largest number that the store can be asked for. No id is as large."""


class Listings:
    """Reads lists from the store."""

    def __init__(self, facts: Facts) -> None:
        self._facts, self._store = facts, facts.store

    async def jobs(self, request: pb.ListRequest) -> pb.JobList:
        """Return jobs, the newest first, or the one that is asked for."""
        rows = await self._facts.db(self._jobs, request)
        queue = await self._facts.db(self._store.jobs.queued)
        places = {row.job_id: place for place, row in enumerate(queue, 1)}
        jobs: list[pb.Job] = []
        size = 0
        for row in rows:
            if size < PAGE_BYTES:
                jobs.append(job_message(row, places.get(row.job_id, 0)))
                size += jobs[-1].ByteSize()
        return pb.JobList(jobs=jobs)

    async def rounds(self, request: pb.ListRequest) -> pb.RoundList:
        """Return rounds, the newest first, or the one that is asked for."""
        if request.round:
            row = await self._facts.db(self._store.rounds.get, min(request.round, MAX_ID))
            return pb.RoundList(rounds=[round_message(row)] if row else [])
        return pb.RoundList(rounds=await self._newest_rounds(request))

    async def models(self, request: pb.ListRequest) -> pb.ModelList:
        """Return models, the newest first."""
        return pb.ModelList(models=await self._facts.db(self._models, limit_of(request)))

    async def privacy(self, request: pb.GetPrivacyRequest) -> pb.Privacy:
        """Return the spent privacy."""
        if not 0 <= request.delta < 1:
            raise BadRequest(f"delta = {request.delta:g} must be above 0 and below 1", reason="bad_delta")
        charges = await self._facts.db(self._store.rounds.charges)
        jobs = await self._facts.db(self._store.jobs.newest, _ALL)
        try:
            return await self._facts.work(privacy_message, charges, jobs, request.delta)
        except NoAccountant as error:
            raise NoEpsilon(str(error)) from error

    async def events(self, after: int, before: int) -> list[pb.Event]:
        """Return the first MOST_ROWS stored events between these ids.

        Each has its round, if that has ended since.
        """
        return await self._facts.db(self._stored_events, after, before)

    async def _newest_rounds(self, request: pb.ListRequest) -> list[pb.Round]:
        """Return the first of the wanted rounds, at least one.

        Rounds of large fleets fill a message soon.
        """
        limit, job_id, below = limit_of(request), min(request.job_id, MAX_ID), min(request.below, MAX_ID)
        found: list[pb.Round] = []
        size, at_once = 0, 1
        while len(found) < limit and size < PAGE_BYTES:
            rows = await self._facts.db(self._store.rounds.newest, min(at_once, limit - len(found)), job_id, below)
            if not rows:
                break
            for row in rows:
                found.append(round_message(row))
                size += found[-1].ByteSize()
                if size >= PAGE_BYTES:
                    break
            below = found[-1].round
            # Few are read at a time, since updates wait for the store, too. But a transaction for each small round
            # would cost ten times as much as the round itself.
            at_once = max(1, min(_ROUNDS_AT_ONCE, _BYTES_AT_ONCE * len(found) // size))
        return found

    def _stored_events(self, after: int, before: int) -> list[pb.Event]:
        rows = [row for row in self._store.events.after(after, MOST_ROWS) if row.id < before]
        rounds = {number: self._store.rounds.get(number) for number in {row.round for row in rows if row.round}}
        return [event_message(row, rounds.get(row.round)) for row in rows]

    def _jobs(self, request: pb.ListRequest) -> list[JobRow]:
        if request.job_id:
            row = self._store.jobs.get(min(request.job_id, MAX_ID))
            return [row] if row else []
        return self._store.jobs.newest(limit_of(request))

    def _models(self, limit: int) -> list[pb.Model]:
        rows, best = self._store.models.newest(limit), self._store.models.best_versions()
        return [
            model_message(
                row,
                self._store.evaluations.total(row.version),
                self._store.rounds.get(row.round),
                best=row.version in best,
            )
            for row in rows
        ]


def limit_of(request: pb.ListRequest) -> int:
    """Return how many rows a request asks for."""
    return min(request.limit or 100, MOST_ROWS)
