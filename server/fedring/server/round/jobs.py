"""The queue of jobs: one at a time, round after round, also across restarts."""

import asyncio
import logging
import time
from contextlib import suppress

from pydantic import ValidationError

from fedring.daemon.config import explain
from fedring.data import DataError
from fedring.rpc.errors import NoSuchJob
from fedring.server.round import machine as rd
from fedring.server.round.coordinator import Coordinator
from fedring.server.state.blobs import FsyncFailed, StorageError, StorageFailed
from fedring.server.state.journal import printable
from fedring.server.state.rows import JobRow
from fedring.train.errors import SeamError
from fedring.train.job import Job

log = logging.getLogger(__name__)


class Jobs:
    """Runs the jobs that the store holds, oldest first."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._facts, self._store = coordinator.facts, coordinator.facts.store
        self._queued = asyncio.Event()
        self._stopped: set[int] = set()
        self.running: JobRow | None = None

    async def start(self, spec: Job, key: str) -> tuple[JobRow, bool]:
        """The job, queued, and whether the idempotency key was known already."""
        wanted = JobRow(
            0, spec.name, spec.model_dump(mode="json"), spec.rounds, time.time(), idempotency_key=key or None
        )
        row = await self._facts.db(self._store.create_job, wanted)
        self._queued.set()
        return row, row.created_at != wanted.created_at

    async def stop(self, job_id: int) -> tuple[int, int]:
        """End the job (0 = the running one) and its round; returns both their numbers."""
        if self.running is not None and job_id in (0, self.running.job_id):
            running = self.running.job_id
            self._stopped.add(running)
            with suppress(
                StorageFailed
            ):  # a disk that refuses this does not keep the job alive: its end is noted later
                await self._facts.db(self._store.set_job_state, running, "stopped")  # also if the server dies now
            return running, await self._coordinator.abandon("stopped")
        row = await self._facts.db(self._store.job, job_id)
        if row is None or row.state != "queued":
            raise NoSuchJob(f"job {job_id} is neither running nor queued" if job_id else "no job is running")
        self._stopped.add(job_id)  # if its turn comes right now
        await self._facts.db(self._store.set_job_state, job_id, "stopped")
        return job_id, 0

    async def run(self) -> None:
        """Run what is queued, for ever; first what a restart interrupted."""
        while True:
            self._queued.clear()
            row = await self._facts.db(self._next)
            if row is None:
                await self._queued.wait()
                continue
            self.running = row
            started = self._coordinator.metrics.job_started
            started.set_to_current_time()
            try:
                state, reason = await self._run_job(row)
            finally:
                self.running = None
                started.set(0)
            await self._facts.keep(self._coordinator.prune)  # of the last round; those before it did with the next one
            await self._facts.keep(self._end, row.job_id, state, reason)
            self._coordinator.recovering = False
            text = f"job {row.job_id} ({row.name}) is {state}" + (f": {reason}" if reason else "")
            self._coordinator.journal.write("job_ended", text, job_id=row.job_id)

    async def _end(self, job_id: int, state: str, reason: str) -> None:
        await self._facts.db(self._store.set_job_state, job_id, state, reason)
        await self._facts.db(self._store.end_orphans)

    def _next(self) -> JobRow | None:
        return self._store.running_job() or self._store.next_queued_job()

    async def _run_job(self, row: JobRow) -> tuple[str, str]:
        """The state in which the job ends, and why."""
        try:
            spec = Job.model_validate(row.spec)
        except ValidationError as error:
            return "failed", printable(f"its specification is not valid: {explain(error, {}, Job)}")
        await self._facts.keep(self._facts.db, self._store.set_job_state, row.job_id, "running")
        verb = "goes on" if row.state == "running" else "starts"
        text = f"job {row.job_id} ({row.name}) {verb}: {row.rounds} rounds of {spec.model}"
        self._coordinator.journal.write("job_started", text, job_id=row.job_id)
        try:
            return await self._run_rounds(row, spec)
        except FsyncFailed:
            raise
        except (SeamError, DataError, StorageError) as error:
            return "failed", str(error)
        except Exception as error:  # the job names the user's code, which may raise anything
            log.exception("job %d failed", row.job_id)
            return "failed", printable(f"{type(error).__name__}: {error}")

    async def _run_rounds(self, row: JobRow, spec: Job) -> tuple[str, str]:
        abandoned = 0
        done = await self._facts.keep(self._facts.db, self._store.job_rounds_ended, row.job_id)
        interrupted = await self._facts.keep(self._facts.db, self._store.open_round)
        while done < row.rounds:
            if row.job_id in self._stopped:
                return "stopped", ""
            if interrupted is not None and interrupted.job_id == row.job_id:
                await self._facts.keep(self._coordinator.resume_round, interrupted, spec)
            else:
                await self._facts.keep(self._coordinator.start_round, row, spec, done + 1)
            interrupted = None
            if row.job_id in self._stopped:  # while the round was being opened
                await self._coordinator.abandon("stopped")
            await self._coordinator.finished.wait()
            last = self._coordinator.last
            done += 1
            abandoned = abandoned + 1 if last is not None and last.phase == rd.Phase.ABANDONED else 0
            if abandoned and row.job_id in self._stopped:
                return "stopped", ""
            if abandoned and (self._coordinator.hopeless or abandoned >= min(spec.max_abandoned, row.rounds)):
                return "failed", self._coordinator.why
        return "completed", ""
