"""One job, run round after round to its end, also across restarts."""

import logging
from collections.abc import Container, Iterator
from contextlib import contextmanager

from pydantic import ValidationError

from fedring.daemon.config import explain
from fedring.daemon.wording import counted
from fedring.server.jobs.patience import no_better
from fedring.server.jobs.starting import JobStarter
from fedring.server.running.keeping import Keeper
from fedring.server.running.opening import RoundOpener, RunningJob
from fedring.server.running.rounds import Rounds, abandon
from fedring.server.running.runner import RoundRunner
from fedring.server.state.facts import Facts
from fedring.server.state.failures import FsyncFailed, StorageError
from fedring.server.state.journal import Journal, printable
from fedring.server.state.rows import JobRow
from fedring.train.errors import SeamError
from fedring.train.jobs.job import Job
from fedring.train.jobs.start import NEWEST
from fedring.train.metrics import is_evaluated

log = logging.getLogger(__name__)

_MOST_ASKED = 100  # rounds that begin only to be refused, because some site has not approved the job
_CHUNK = 32  # rounds that are read at once


class JobRunner:
    """Runs jobs, one round after the other."""

    def __init__(
        self,
        starter: JobStarter,
        opener: RoundOpener,
        runner: RoundRunner,
        keeper: Keeper,
        rounds: Rounds,
        facts: Facts,
        journal: Journal,
    ) -> None:
        self._starter, self._opener, self._runner, self._keeper = starter, opener, runner, keeper
        self._rounds, self._facts, self._journal = rounds, facts, journal

    async def run(self, row: JobRow, stopped: Container[int]) -> tuple[str, str]:
        """Run a job to its end, or until it is stopped.

        It is stopped when its id is among the stopped ones.

        Returns:
            The state in which it ends, and why.
        """
        try:
            spec = Job.model_validate(row.spec)
        except ValidationError as error:
            return "failed", printable(f"its specification is not valid: {explain(error, {}, Job)}")
        await self._facts.keep(self._facts.db, self._facts.store.jobs.take_up, row.job_id)
        try:
            with _faults_of_the_job(row.job_id):
                job, what = await self._facts.keep(self._starter.begin, row, spec)
            text = f"job {row.job_id} ({row.name}) {what}: {counted(row.rounds, 'round')} of {job.spec.model}"
            self._journal.write("job_started", text, job_id=row.job_id)
            return await self._run_rounds(job, stopped)
        except _JobFault as fault:
            return "failed", str(fault)
        finally:
            self._opener.close(row.job_id)

    async def wind_up(self, row: JobRow, state: str, reason: str) -> tuple[str, str]:
        """Judge the evaluations of a job, and delete old models.

        Returns:
            The state in which it ends, and why, with a clause on how to go on.
        """
        facts = self._facts
        if state == "completed" and (why := await facts.keep(facts.db, self._unevaluated, row)):
            state, reason = "failed", why
        if state == "failed" and not reason.startswith("damaged_blob"):  # that one says itself how to go on
            reason += await facts.keep(facts.db, self._way_on, row.job_id)
        await facts.keep(self._keeper.prune)  # after the last round: each round does it for those before it
        return state, reason

    async def _run_rounds(self, job: RunningJob, stopped: Container[int]) -> tuple[str, str]:
        row, spec = job.row, job.spec
        abandoned = asked = 0  # rounds, one after the other; and those in which sites learned what they are asked
        with _faults_of_the_job(row.job_id):
            done = await self._facts.keep(self._facts.db, self._facts.store.rounds.ended_of, row.job_id)
            unended = await self._facts.keep(self._facts.db, self._facts.store.rounds.unended)
        interrupted = next((each for each in unended if each.job_id == row.job_id), None)
        while done < row.rounds:
            if row.job_id in stopped:
                return "stopped", ""
            with _faults_of_the_job(row.job_id):
                if interrupted is not None:
                    open_ = await self._facts.keep(self._opener.resume, interrupted, job)
                else:
                    if why := await self._facts.keep(self._opener.refuses, job):
                        return ("completed", f"it ended early: {why}") if done else ("failed", why)
                    base = await self._facts.keep(self._starter.base_of, job)
                    open_ = await self._facts.keep(self._opener.open, job, done + 1, base)
            interrupted = None
            if row.job_id in stopped:  # while the round was being opened
                await abandon(self._rounds, open_, "stopped")
            outcome = await self._runner.run(open_)
            asked = asked + 1 if outcome.unapproved else 0
            if 0 < asked < _MOST_ASKED:
                continue  # the round is opened again, and waits for these clients
            done += 1
            abandoned = 0 if outcome.published else abandoned + 1
            if abandoned and row.job_id in stopped:
                return "stopped", ""
            if abandoned and (not outcome.retryable or abandoned >= min(spec.max_abandoned, row.rounds)):
                return "failed", outcome.reason
            if outcome.published and spec.patience:
                text = await self._facts.keep(self._facts.db, no_better, self._facts.store.rounds, row.job_id, spec)
                if text and spec.min_rounds <= done < row.rounds:
                    return "completed", text
        return "completed", ""

    def _unevaluated(self, row: JobRow) -> str:
        """Return why no model of a job could be evaluated.

        Empty if one was, or if neither clients nor the server have tried.
        """
        below, why = 0, ""
        # Usually the newest round was evaluated, and this reads no other.
        while chunk := self._facts.store.rounds.newest(1 if not below else _CHUNK, row.job_id, below):
            published = [each for each in chunk if each.model_version]
            if any(is_evaluated(each.stats.get("metrics", {})) for each in published):
                return ""
            why = why or next((told for each in published if (told := each.stats.get("unevaluated"))), "")
            below = chunk[-1].round
        return f"none of its models was evaluated: {why}" if why else ""

    def _way_on(self, job_id: int) -> str:
        """Return a clause on continuing a failed job from its last model.

        Empty if it has published none.
        """
        row, newest = self._facts.store.jobs.get(job_id), self._facts.store.models.newest(1, job_id)
        if row is None or not row.rounds_done or not newest:
            return ""
        return f"; to go on from its last model, version {newest[0].version}, start a job with start={NEWEST}"


class _JobFault(Exception):
    """The job fails; the text says why."""


@contextmanager
def _faults_of_the_job(job_id: int) -> Iterator[None]:
    """Turn errors inside into a `_JobFault`, which ends only the job.

    Elsewhere, an error ends the daemon.
    """
    try:
        yield
    except FsyncFailed:
        raise
    except (SeamError, StorageError) as error:
        raise _JobFault(str(error)) from error
    except Exception as error:  # the job names the user's code, which may raise anything
        log.exception("job %d failed", job_id)
        raise _JobFault(printable(f"{type(error).__name__}: {error}")) from error
