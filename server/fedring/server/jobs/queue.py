"""The queue of jobs: one at a time, also across restarts."""

import asyncio
import logging
import time
from contextlib import suppress

from prometheus_client import Gauge

from fedring.rpc.errors import NoSuchJob
from fedring.server.jobs.runner import JobRunner
from fedring.server.round.rounds import Rounds
from fedring.server.state.facts import Facts
from fedring.server.state.failures import StorageFailed
from fedring.server.state.journal import Journal
from fedring.server.state.rows import JobRow
from fedring.train.jobs.job import Job

log = logging.getLogger(__name__)

_ALL = 1_000_000_000


class Jobs:
    """Runs the jobs that the store holds, oldest first.

    Attributes:
        running: the job that runs, or None.
    """

    def __init__(
        self,
        runner: JobRunner,
        rounds: Rounds,
        facts: Facts,
        journal: Journal,
        started: Gauge,
    ) -> None:
        self._runner, self._rounds, self._facts, self._kept = runner, rounds, facts, facts.store.jobs
        self._journal, self._started = journal, started
        self._queued = asyncio.Event()
        self._stopped: set[int] = set()
        self.running: JobRow | None = None

    async def start(self, spec: Job, key: str) -> tuple[JobRow, bool]:
        """Queue a job.

        Args:
            spec: the job.
            key: its idempotency key, or "".

        Returns:
            The job's row, and whether the key was known already: then the row is that of the job it belongs to.
        """
        open_ = {"seed"} if spec.seed_is_open else None  # it is chosen when the job starts
        stored = spec.model_dump(mode="json", exclude=open_)
        wanted = JobRow(0, spec.name, stored, spec.rounds, time.time(), idempotency_key=key or None)
        row = await self._facts.db(self._kept.create, wanted)
        self._queued.set()
        return row, row.created_at != wanted.created_at

    async def stop(self, job_id: int) -> tuple[int, int]:
        """End a job, and its round if it runs.

        Args:
            job_id: the job; 0 means the running one.

        Returns:
            The numbers of the job and of the round, 0 if no round was ended.

        Raises:
            NoSuchJob: if the job is neither running nor queued.
        """
        if self.running is not None and job_id in (0, self.running.job_id):
            running = self.running.job_id
            self._stopped.add(running)
            # A disk that refuses this does not keep the job alive: its end is noted later.
            with suppress(StorageFailed):
                await self._facts.db(self._kept.set_state, running, "stopped")  # holds also if the server dies now
            return running, await self._rounds.abandon(self._rounds.of_job(running), "stopped")
        row = await self._facts.db(self._kept.get, job_id)
        if row is None or row.state != "queued":
            raise NoSuchJob(f"job {job_id} is neither running nor queued" if job_id else "no job is running")
        self._stopped.add(job_id)  # its turn may come right now
        await self._facts.db(self._kept.set_state, job_id, "stopped")
        return job_id, 0

    async def run(self) -> None:
        """Run queued jobs until cancelled, first those that a restart interrupted."""
        while True:
            self._queued.clear()
            row = await self._facts.db(self._next)
            if row is None:
                await self._queued.wait()
                continue
            self.running = row
            self._started.set_to_current_time()
            try:
                state, reason = await self._runner.run(row, self._stopped)
            finally:
                self.running = None
                self._started.set(0)
            state, reason = await self._runner.wind_up(row, state, reason)
            # Stored last: after a kill before this line, the next process still finds the job running.
            await self._facts.keep(self._end, row.job_id, state, reason)
            self._rounds.recovering = False
            verb = {"failed": "has", "stopped": "was"}.get(state, "is")
            text = f"job {row.job_id} ({row.name}) {verb} {state}" + (f": {reason}" if reason else "")
            self._journal.write("job_ended", text, job_id=row.job_id)

    async def _end(self, job_id: int, state: str, reason: str) -> None:
        await self._facts.db(self._kept.set_state, job_id, state, reason)
        await self._facts.db(self._facts.store.rounds.end_orphans)

    def _next(self) -> JobRow | None:
        return self._kept.running() or self._kept.next_queued()
