"""The queue of jobs: some run at once, also across restarts."""

import asyncio
import logging
import time

from prometheus_client import Gauge

from fedring.rpc.errors import NoSuchJob, SeveralJobs
from fedring.server.jobs.runner import JobRunner
from fedring.server.running.rounds import Rounds, abandon
from fedring.server.running.runner import drop_partials
from fedring.server.state.facts import Facts
from fedring.server.state.failures import StorageError
from fedring.server.state.journal import Journal, printable
from fedring.server.state.rows import JobRow
from fedring.train.jobs.job import Job

log = logging.getLogger(__name__)

_ALL = 1_000_000_000


class Jobs:
    """Runs the stored jobs, in the order of the queue.

    Args:
        runner: runs one job.
        rounds: that are open.
        facts: hold the jobs.
        journal: where their ends are told.
        started: since when the longest one runs.
        most: how many run at once. After a restart, all that ran go on.

    Attributes:
        running: the jobs that run, by their ids.
        waiting: how many were in the queue at the last look.
    """

    def __init__(
        self, runner: JobRunner, rounds: Rounds, facts: Facts, journal: Journal, started: Gauge, *, most: int = 1
    ) -> None:
        self._runner, self._rounds, self._facts, self._kept = runner, rounds, facts, facts.store.jobs
        self._journal, self._started, self.most = journal, started, most
        self._moved = asyncio.Event()  # a job was queued, or has ended
        self._taken_up = asyncio.Event()  # those that a restart interrupted run again
        self._stopped: set[int] = set()
        self._over: set[int] = set()  # those that run, but whose ends are noted
        self._since: dict[int, float] = {}
        self.running: dict[int, JobRow] = {}
        self.waiting = 0

    async def start(self, spec: Job, key: str, signed: bytes = b"") -> tuple[JobRow, bool]:
        """Queue a job.

        Args:
            spec: the job.
            key: its idempotency key, or "".
            signed: the job as an operator has signed it, serialized; b"" = nobody has.

        Returns:
            The job's row, and whether the key was known already: then the row is that of the job it belongs to.
        """
        open_ = {"seed"} if spec.seed_is_open else None  # it is chosen when the job starts
        stored = spec.model_dump(mode="json", exclude=open_)
        wanted = JobRow(0, spec.name, stored, spec.rounds, time.time(), idempotency_key=key or None, signed=signed)
        row = await self._facts.db(self._kept.create, wanted)
        self._moved.set()
        return row, row.created_at != wanted.created_at

    async def stop(self, job_id: int) -> tuple[int, int]:
        """End a job, and its round if it runs.

        One that a restart interrupted is first taken up again.

        Args:
            job_id: the job; 0 means the only one that runs.

        Returns:
            The numbers of the job and of the round, 0 if no round was ended.

        Raises:
            NoSuchJob: if the job is neither running nor queued.
            SeveralJobs: if it is not said which of several.
            StorageError: if the disk refuses it. The job stays in the queue.
        """
        if not self._taken_up.is_set():
            interrupted = await self._facts.db(self._kept.running)
            if interrupted:
                await self._taken_up.wait()
        wanted = job_id or self.only()
        if wanted not in self.running:
            row = await self._facts.db(self._kept.get, wanted)
            if row is None or row.state != "queued":
                raise NoSuchJob(f"job {wanted} is neither running nor queued" if wanted else "no job is running")
        try:
            if not await self._facts.db(self._kept.stop, wanted):  # holds also if the server dies now
                raise NoSuchJob(f"job {wanted} has just ended")
        except StorageError:
            if wanted not in self.running:
                raise
            if wanted in self._over:
                raise NoSuchJob(f"job {wanted} has just ended") from None
            # A disk that refuses this does not keep a job alive that runs: its end is noted later.
        self._stopped.add(wanted)
        self._moved.set()
        return wanted, await abandon(self._rounds, self._rounds.of_job(wanted), "stopped")

    @property
    def silent_since(self) -> float:
        """Since when one of the jobs has published nothing.

        It is that for which this is longest ago; it may have been taken up then. In wall-clock seconds; 0 if none runs.
        Any thread may ask.
        """
        published = self._rounds.published_at
        return min((max(at, published.get(job_id, 0.0)) for job_id, at in list(self._since.items())), default=0.0)

    def only(self) -> int:
        """Return the job that runs; 0 if none does.

        Raises:
            SeveralJobs: if several run: the sentence names them.
        """
        if len(self.running) > 1:
            names = ", ".join(f"{row.job_id} ({row.name})" for row in self.running.values())
            raise SeveralJobs(f"several jobs run, so say which one you mean: {names}")
        return next(iter(self.running), 0)

    async def move(self, job_id: int, *, before: int = 0, last: bool = False) -> None:
        """Move a queued job to another place: see `JobStore.move`.

        Raises:
            NoSuchJob: if one of the two jobs is not queued.
        """
        if not await self._facts.db(self._kept.move, job_id, before=before, last=last):
            both = f"job {job_id} and job {before} are" if before else f"job {job_id} is"
            raise NoSuchJob(f"{both} not both in the queue" if before else f"{both} not in the queue")

    async def run(self) -> None:
        """Run queued jobs until cancelled, first those that a restart interrupted.

        Raises:
            FsyncFailed, Exception: whatever ends one of them and is no fault of that job: it ends the daemon.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    self._moved.clear()
                    while row := await self._facts.keep(self._facts.db, self._next):
                        self._begin(tasks, row)
                    self._taken_up.set()
                    await self._moved.wait()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from group

    def _begin(self, tasks: asyncio.TaskGroup, row: JobRow) -> None:
        self.running[row.job_id], self._since[row.job_id] = row, time.time()
        self._started.set(min(self._since.values()))
        tasks.create_task(self._run(row))

    async def _run(self, row: JobRow) -> None:
        """Run one job to its end."""
        with self._facts.lane():
            state, reason = await self._runner.run(row, self._stopped)
            state, reason = await self._runner.wind_up(row, state, reason)
        reason = printable(reason)  # the words of users' code may hold what no database takes
        # Stored last: after a kill before this line, the next process still finds the job running.
        ended = await self._facts.keep(self._end, row.job_id, state, reason)
        del self.running[row.job_id], self._since[row.job_id]
        self._over.discard(row.job_id)
        self._started.set(min(self._since.values(), default=0))
        self._rounds.job_ended(row.job_id)
        await drop_partials(self._rounds, self._facts)
        verb = {"failed": "has", "stopped": "was"}.get(ended.state, "is")
        text = f"job {row.job_id} ({row.name}) {verb} {ended.state}" + (f": {ended.reason}" if ended.reason else "")
        self._journal.write("job_ended", text, job_id=row.job_id)
        self._moved.set()

    async def _end(self, job_id: int, state: str, reason: str) -> JobRow:
        """Note how a job has ended, and return it.

        It was stopped if an operator was told so, also while it made its last model, or while the disk refused that.
        """
        if job_id in self._stopped:
            state, reason = "stopped", ""
        ended = await self._facts.db(self._kept.set_state, job_id, state, reason)
        if job_id in self._stopped and ended.state != "stopped":  # the operator was told while that was being noted
            ended = await self._facts.db(self._kept.set_state, job_id, "stopped", "")
        self._over.add(job_id)
        await self._facts.db(self._facts.store.rounds.end_orphans, job_id)
        return ended

    def _next(self) -> JobRow | None:
        """Return the next job to begin, if there is one.

        Those that a restart interrupted wait for nobody.
        """
        queue = [row for row in self._kept.queued() if row.job_id not in self.running]
        found = [row for row in self._kept.running() if row.job_id not in self.running]
        found += queue if len(self.running) < self.most else []
        self.waiting = len(queue) - (found[:1] == queue[:1] and bool(queue))
        return found[0] if found else None
