"""The queue of jobs: one at a time, round after round, also across restarts."""

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from prometheus_client import Gauge
from pydantic import ValidationError

from fedring.daemon.config import explain
from fedring.daemon.wording import counted
from fedring.data import DataError
from fedring.rpc.errors import NoSuchJob
from fedring.server.jobs.starting import JobStarter
from fedring.server.round.opening import RoundOpener, RunningJob
from fedring.server.round.private_rounds import RoundPrivacy
from fedring.server.round.rounds import Rounds
from fedring.server.round.runner import RoundRunner
from fedring.server.state.facts import Facts
from fedring.server.state.failures import FsyncFailed, StorageError, StorageFailed
from fedring.server.state.journal import Journal, printable
from fedring.server.state.ratings import best_of
from fedring.server.state.rows import JobRow
from fedring.train.errors import SeamError
from fedring.train.job import Job
from fedring.train.metrics import result_of
from fedring.train.start import NEWEST

log = logging.getLogger(__name__)

_ALL = 1_000_000_000


class Jobs:
    """Runs the jobs that the store holds, oldest first.

    Attributes:
        running: the job that runs, or None.
    """

    def __init__(
        self,
        starter: JobStarter,
        opener: RoundOpener,
        runner: RoundRunner,
        privacy: RoundPrivacy,
        rounds: Rounds,
        facts: Facts,
        journal: Journal,
        started: Gauge,
    ) -> None:
        self._starter, self._opener, self._runner, self._privacy = starter, opener, runner, privacy
        self._rounds = rounds
        self._facts, self._store = facts, facts.store
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
        row = await self._facts.db(self._store.create_job, wanted)
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
                await self._facts.db(self._store.set_job_state, running, "stopped")  # holds also if the server dies now
            return running, await self._rounds.abandon(self._rounds.of_job(running), "stopped")
        row = await self._facts.db(self._store.job, job_id)
        if row is None or row.state != "queued":
            raise NoSuchJob(f"job {job_id} is neither running nor queued" if job_id else "no job is running")
        self._stopped.add(job_id)  # its turn may come right now
        await self._facts.db(self._store.set_job_state, job_id, "stopped")
        return job_id, 0

    async def run(self) -> None:
        """Run what is queued until cancelled; first what a restart interrupted."""
        while True:
            self._queued.clear()
            row = await self._facts.db(self._next)
            if row is None:
                await self._queued.wait()
                continue
            self.running = row
            self._started.set_to_current_time()
            try:
                state, reason = await self._run_job(row)
            finally:
                self.running = None
                self._started.set(0)
            if state == "failed" and not reason.startswith("damaged_blob"):  # that one says itself how to go on
                reason += await self._facts.keep(self._facts.db, self._way_on, row.job_id)
            await self._facts.keep(self._runner.prune)  # after the last round: each round does it for those before it
            await self._facts.keep(self._end, row.job_id, state, reason)
            self._rounds.recovering = False
            verb = {"failed": "has", "stopped": "was"}.get(state, "is")
            text = f"job {row.job_id} ({row.name}) {verb} {state}" + (f": {reason}" if reason else "")
            self._journal.write("job_ended", text, job_id=row.job_id)

    async def _end(self, job_id: int, state: str, reason: str) -> None:
        await self._facts.db(self._store.set_job_state, job_id, state, reason)
        await self._facts.db(self._store.end_orphans)

    def _no_better(self, job_id: int, spec: Job) -> str:
        """Return why a job ends early: since its best model it has published `patience` others. Empty if it has not."""
        patience = spec.patience
        published = [model for model in self._store.models(_ALL, job_id) if model.round]
        best = best_of(published, spec.best_by)
        # Every published round makes one version, and no other job runs meanwhile.
        if best is None or published[0].version - best.version < patience:
            return ""
        result = f"version {best.version} ({result_of(best.metrics, spec.best_by)})"
        return f"it ended early: {result} was not surpassed for {counted(patience, 'round')}"

    def _way_on(self, job_id: int) -> str:
        """Return a clause that says how to go on from the last model of a job that has failed; empty without one."""
        row, newest = self._store.job(job_id), self._store.models(1, job_id)
        if row is None or not row.rounds_done or not newest:
            return ""
        return f"; to go on from its last model, version {newest[0].version}, start a job with start={NEWEST}"

    def _next(self) -> JobRow | None:
        return self._store.running_job() or self._store.next_queued_job()

    async def _run_job(self, row: JobRow) -> tuple[str, str]:
        """Run the job to its end. Returns the state in which it ends, and why."""
        try:
            spec = Job.model_validate(row.spec)
        except ValidationError as error:
            return "failed", printable(f"its specification is not valid: {explain(error, {}, Job)}")
        await self._facts.keep(self._facts.db, self._store.set_job_state, row.job_id, "running")
        try:
            with _faults_of_the_job(row.job_id):
                job, what = await self._facts.keep(self._starter.begin, row, spec)
            text = f"job {row.job_id} ({row.name}) {what}: {counted(row.rounds, 'round')} of {job.spec.model}"
            self._journal.write("job_started", text, job_id=row.job_id)
            return await self._run_rounds(job)
        except _JobFault as fault:
            return "failed", str(fault)

    async def _run_rounds(self, job: RunningJob) -> tuple[str, str]:
        row, spec = job.row, job.spec
        abandoned = 0  # rounds, one after the other
        with _faults_of_the_job(row.job_id):
            done = await self._facts.keep(self._facts.db, self._store.job_rounds_ended, row.job_id)
            interrupted = await self._facts.keep(self._facts.db, self._store.open_round)
        while done < row.rounds:
            if row.job_id in self._stopped:
                return "stopped", ""
            with _faults_of_the_job(row.job_id):
                if interrupted is not None and interrupted.job_id == row.job_id:
                    open_ = await self._facts.keep(self._opener.resume, interrupted, job)
                else:
                    if why := await self._facts.keep(self._privacy.spent, spec):
                        return ("completed", f"it ended early: {why}") if done else ("failed", why)
                    base = await self._facts.keep(self._starter.base_of, job)
                    open_ = await self._facts.keep(self._opener.open, job, done + 1, base)
            interrupted = None
            if row.job_id in self._stopped:  # while the round was being opened
                await self._rounds.abandon(open_, "stopped")
            outcome = await self._runner.run(open_)
            done += 1
            abandoned = 0 if outcome.published else abandoned + 1
            if abandoned and row.job_id in self._stopped:
                return "stopped", ""
            if abandoned and (not outcome.retryable or abandoned >= min(spec.max_abandoned, row.rounds)):
                return "failed", outcome.reason
            if outcome.published and spec.patience and done < row.rounds:
                text = await self._facts.keep(self._facts.db, self._no_better, row.job_id, spec)
                if text:
                    return "completed", text
        return "completed", ""


class _JobFault(Exception):
    """The job fails; the text says why."""


@contextmanager
def _faults_of_the_job(job_id: int) -> Iterator[None]:
    """Let what goes wrong inside end the job as a `_JobFault`. Elsewhere, an error ends the daemon."""
    try:
        yield
    except FsyncFailed:
        raise
    except (SeamError, DataError, StorageError) as error:
        raise _JobFault(str(error)) from error
    except Exception as error:  # the job names the user's code, which may raise anything
        log.exception("job %d failed", job_id)
        raise _JobFault(printable(f"{type(error).__name__}: {error}")) from error
