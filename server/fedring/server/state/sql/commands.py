"""Commands that outlive their rounds, in the database."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from sqlalchemy import delete, select

from fedring.daemon.crash import crashpoint
from fedring.server.state.rows import CommandRow
from fedring.server.state.sql import sealed
from fedring.server.state.sql.tables import commands, jobs
from fedring.server.state.sql.transactions import Database


class CommandStore:
    """The commands of a run that clients still work on."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def give(self, job_id: int, rows: Sequence[CommandRow], going_on: Collection[str]) -> None:
        """Keep new commands of a job, and forget those that are over.

        Args:
            job_id: The job.
            rows: The new commands; there may be none.
            going_on: The clients that still work on older ones.
        """
        over = (commands.c.job_id == job_id) & commands.c.client_id.not_in(sorted(going_on))
        with self._database.transaction() as connection:
            connection.execute(delete(commands).where(over))
            if rows:
                sealed.add(connection, *rows)
            crashpoint("before_commands_commit")
        crashpoint("after_commands_commit")

    def of_job(self, job_id: int) -> list[CommandRow]:
        """Return the commands of a job, in client-id order."""
        query = select(commands).where(commands.c.job_id == job_id).order_by(commands.c.client_id)
        return self._database.all(query, CommandRow)

    def of_running_jobs(self) -> list[CommandRow]:
        """Return the commands of all jobs that run."""
        running = select(jobs.c.job_id).where(jobs.c.state == "running")
        return self._database.all(select(commands).where(commands.c.job_id.in_(running)), CommandRow)

    def delay(self, seconds: float) -> None:
        """Give all clients so much more time for their commands."""
        with self._database.transaction() as connection:
            for row in sealed.rows_of(connection, select(commands), CommandRow):
                sealed.put(connection, replace(row, until=row.until + seconds))

    def drop(self, job_id: int, clients: Collection[str]) -> None:
        """Forget the commands of these clients of a job."""
        mine = (commands.c.job_id == job_id) & commands.c.client_id.in_(sorted(clients))
        with self._database.transaction() as connection:
            connection.execute(delete(commands).where(mine))
