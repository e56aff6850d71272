"""The jobs in the database."""

from collections.abc import Sequence
from dataclasses import replace

from sqlalchemy import Connection, bindparam, select

from fedring.daemon.crash import crashpoint
from fedring.server.state.rows import JobRow, ModelRow
from fedring.server.state.sql import sealed
from fedring.server.state.sql.sealed import rows_of
from fedring.server.state.sql.tables import jobs, models
from fedring.server.state.sql.transactions import Database

_ONE = select(jobs).where(jobs.c.job_id == bindparam("job"))  # asked for each round
_QUEUE = select(jobs).where(jobs.c.state == "queued").order_by(jobs.c.place, jobs.c.job_id)


class JobStore:
    """The jobs of a run."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, job: JobRow) -> JobRow:
        """Queue a job, and return it with its new id.

        It goes ahead of the jobs at the end that have a lower priority. If there is one with its idempotency key, that
        one is returned.
        """
        with self._database.transaction() as connection:
            if job.idempotency_key is not None:
                query = select(jobs).where(jobs.c.idempotency_key == job.idempotency_key)
                if found := rows_of(connection, query, JobRow):
                    return found[0]
            queue = rows_of(connection, _QUEUE, JobRow)
            ahead = len(queue)
            while ahead and queue[ahead - 1].priority < job.priority:
                ahead -= 1
            added = sealed.add_numbered(connection, replace(job, place=len(queue) + 1), "job_id")
            return _number(connection, [*queue[:ahead], added, *queue[ahead:]])[added.job_id]

    def move(self, job_id: int, *, before: int = 0, last: bool = False) -> bool:
        """Move a queued job to another place in the queue.

        Args:
            job_id: The job.
            before: The queued job that it is to be ahead of; 0 = of all.
            last: Whether it is to be behind all others instead.

        Returns:
            Whether both jobs were in the queue; if not, nothing has changed.
        """
        with self._database.transaction() as connection:
            queue = rows_of(connection, _QUEUE, JobRow)
            others = [row for row in queue if row.job_id != job_id]
            ids = [row.job_id for row in others]
            if len(others) == len(queue) or (before and before not in ids):
                return False
            at = len(ids) if last else ids.index(before) if before else 0
            mine = next(row for row in queue if row.job_id == job_id)
            _number(connection, [*others[:at], mine, *others[at:]])
            return True

    def of_key(self, key: str) -> JobRow | None:
        """Return the job with this idempotency key; None if there is none."""
        return self._database.first(select(jobs).where(jobs.c.idempotency_key == key), JobRow)

    def begin(self, job: JobRow, version: int, after: tuple[int, int], first: ModelRow | None = None) -> None:
        """Note a job's specification and its start, in one transaction.

        Args:
            job: The job.
            version: The version that it starts from.
            after: The epoch and the number of the round before its line of models.
            first: The row of that version, if it is new.
        """
        with self._database.transaction() as connection:
            if first is not None:
                sealed.add(connection, first)
            values = {"start_version": version, "residual_epoch": after[0], "residual_after": after[1]}
            sealed.change(connection, JobRow, jobs.c.job_id == job.job_id, spec=job.spec, **values)
            crashpoint("before_begin_commit")
        crashpoint("after_begin_commit")

    def set_state(self, job_id: int, state: str, reason: str = "") -> JobRow:
        """Change the state of a job that was not stopped.

        Returns the job as it is then.
        """
        with self._database.transaction() as connection:
            (row,) = rows_of(connection, _ONE, JobRow, {"job": job_id})
            if row.state != "stopped":
                row = replace(row, state=state, reason=reason)
                sealed.put(connection, row)
            return row

    def take_up(self, job_id: int) -> None:
        """Note that a job runs, unless it was stopped meanwhile."""
        self._go_to(job_id, "running")

    def stop(self, job_id: int) -> bool:
        """Note that a job was stopped, unless it has ended.

        Returns whether it had not.
        """
        return self._go_to(job_id, "stopped")

    def _go_to(self, job_id: int, state: str) -> bool:
        """Change the state of a job, unless it has ended otherwise.

        Returns whether it had not.
        """
        which = (jobs.c.job_id == job_id) & jobs.c.state.in_(("queued", "running", state))
        with self._database.transaction() as connection:
            found = rows_of(connection, select(jobs).where(which), JobRow)
            for row in found:
                sealed.put(connection, replace(row, state=state, reason=""))
            return bool(found)

    def get(self, job_id: int) -> JobRow | None:
        """Return a job; None if there is none with that id."""
        with self._database.transaction() as connection:
            return next(iter(rows_of(connection, _ONE, JobRow, {"job": job_id})), None)

    def newest(self, limit: int = 100) -> list[JobRow]:
        """Return the newest jobs, newest first."""
        return self._database.all(select(jobs).order_by(jobs.c.job_id.desc()).limit(limit), JobRow)

    def queued(self) -> list[JobRow]:
        """Return the queued jobs, in their order."""
        return self._database.all(_QUEUE, JobRow)

    def running(self) -> list[JobRow]:
        """Return the jobs that are running, or were when the server stopped."""
        return self._database.all(select(jobs).where(jobs.c.state == "running").order_by(jobs.c.job_id), JobRow)


def _number(connection: Connection, queue: Sequence[JobRow]) -> dict[int, JobRow]:
    """Number the queue anew, and return its rows by their ids."""
    rows = {row.job_id: replace(row, place=place) for place, row in enumerate(queue, 1)}
    for before in queue:
        if before.place != rows[before.job_id].place:
            sealed.put(connection, rows[before.job_id])
    return rows


def count_published(connection: Connection, job_id: int) -> None:
    """Count a round of a job that has published a model."""
    (job,) = rows_of(connection, _ONE, JobRow, {"job": job_id})
    sealed.put(connection, replace(job, rounds_done=job.rounds_done + 1))


def best_by(connection: Connection) -> dict[int, str]:
    """Return the key best_by of each job with a model."""
    query = select(jobs).where(jobs.c.job_id.in_(select(models.c.job_id)))
    return {job.job_id: str(job.spec.get("best_by", "")) for job in rows_of(connection, query, JobRow)}
