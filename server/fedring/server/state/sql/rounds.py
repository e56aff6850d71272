"""The rounds in the database, and rows that their kinds keep."""

import time

from sqlalchemy import Connection, and_, bindparam, delete, select

from fedring.daemon.crash import crashpoint
from fedring.server.state.rows import Acceptance, ChargeRow, ModelRow, RoundRow
from fedring.server.state.sql import sealed
from fedring.server.state.sql.schema import KEPT, TABLE_OF
from fedring.server.state.sql.sealed import Row, rows_of
from fedring.server.state.sql.tables import COUNTED, PUBLISHED, charges, commands, jobs, models, rounds
from fedring.server.state.sql.transactions import Database

_OPENED = select(rounds.c.round).where(rounds.c.ended_at.is_(None))
_FORGET_ENDED = [delete(table).where(table.c.round.not_in(_OPENED)) for table in KEPT]
_COMMANDED = select(commands.c.client_id).where(commands.c.job_id == bindparam("job"))


class RoundStore:
    """The rounds of a run."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, row: RoundRow) -> RoundRow:
        """Add a round, and return it with its new number.

        The number is above the numbers of all rounds there ever were.
        """
        with self._database.transaction() as connection:
            return sealed.add_numbered(connection, row, "round")

    def skip(self, job_id: int) -> int:
        """Use up the next number of a round, and return it.

        It is above those of all rounds there ever were, and no round will have it.

        Args:
            job_id: The job for which this is done.
        """
        with self._database.transaction() as connection:
            row = sealed.add_numbered(connection, RoundRow(0, job_id, 0, "abandoned", time.time()), "round")
            connection.execute(delete(rounds).where(rounds.c.round == row.round))
            return row.round

    def replace(self, row: RoundRow) -> None:
        """Replace the row of a round.

        What its kind has kept of it (`KeptStore`) goes with its end.

        Raises:
            StoreError: "corrupt", if there is no such round.
        """
        with self._database.transaction() as connection:
            replace_round(connection, row)

    def save_seconds_left(self, number: int, phase: str, seconds: float) -> None:
        """Note how long a round may stay in its phase.

        Nothing changes if the round is in another phase by now.
        """
        this = (rounds.c.round == number) & (rounds.c.phase == phase)
        with self._database.transaction() as connection:
            sealed.change(connection, RoundRow, this, seconds_left=seconds)

    def get(self, number: int) -> RoundRow | None:
        """Return a round; None if it is not kept."""
        return self._database.first(select(rounds).where(rounds.c.round == number), RoundRow)

    def newest(self, limit: int = 100, job_id: int = 0, below: int = 0) -> list[RoundRow]:
        """Return the newest rounds, newest first.

        `job_id` and `below`, a number, select some unless they are 0.
        """
        query = select(rounds).order_by(rounds.c.round.desc()).limit(limit)
        if below:
            query = query.where(rounds.c.round < below)
        return self._database.all(query.where(rounds.c.job_id == job_id) if job_id else query, RoundRow)

    def ended_of(self, job_id: int) -> int:
        """Return the number of a job's ended rounds.

        They were published or abandoned. Pruned ones count, too; those that sites had not approved do not.
        """
        ended = select(rounds).where(rounds.c.job_id == job_id, COUNTED)
        last = self._database.first(ended.order_by(rounds.c.job_round.desc()), RoundRow)
        return last.job_round if last else 0

    def last_published(self, job_id: int) -> RoundRow | None:
        """Return a job's newest round with a published model, or None."""
        published = select(rounds).where(rounds.c.job_id == job_id, PUBLISHED)
        return self._database.first(published.order_by(rounds.c.round.desc()), RoundRow)

    def unended(self) -> list[RoundRow]:
        """Return the rounds that have not ended, oldest first.

        A restarted server continues there.
        """
        return self._database.all(select(rounds).where(rounds.c.ended_at.is_(None)).order_by(rounds.c.round), RoundRow)

    def end_orphans(self, job_id: int = 0) -> None:
        """Abandon the open rounds of a job that is not running.

        The reason is "job_ended". 0 = of all such jobs: another one that was stopped may be about to publish.
        """
        running = select(jobs.c.job_id).where(jobs.c.state == "running")
        orphans = rounds.c.ended_at.is_(None) & rounds.c.job_id.not_in(running.scalar_subquery())
        orphans = orphans & (rounds.c.job_id == job_id) if job_id else orphans
        with self._database.transaction() as connection:
            ended = {"phase": "abandoned", "reason": "job_ended", "ended_at": time.time()}
            sealed.change(connection, RoundRow, orphans, **ended)
            _forget_ended(connection)
            connection.execute(delete(commands).where(commands.c.job_id.not_in(running.scalar_subquery())))

    def save_evaluation(self, row: RoundRow) -> None:
        """Replace an evaluated round's row, and keep its metrics.

        The metrics are kept with the model.
        """
        published = models.c.version == row.model_version
        with self._database.transaction() as connection:
            replace_round(connection, row)
            sealed.change(connection, ModelRow, published, metrics=row.stats.get("metrics", {}))

    def charges(self) -> list[ChargeRow]:
        """Return the charges of rounds with differential privacy.

        The oldest is first. None is ever pruned.
        """
        return self._database.all(select(charges).order_by(charges.c.round), ChargeRow)


class KeptStore:
    """The rows that kinds of rounds keep while their round is open.

    They go with its end. `fedring.server.state.sql.schema` lists the kinds of rows; each has the number of its round.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, row: object, commit: str) -> Acceptance:
        """Keep a row, unless there is one with its key.

        Args:
            row: the row.
            commit: names the commit for fault tests.

        Raises:
            StorageError: "database", if there is no such round.
        """
        table, values, outcome = TABLE_OF[type(row)], sealed.values_of(row), Acceptance.NEW
        same = and_(*(column == values[column.name] for column in table.primary_key))
        with self._database.transaction() as connection:
            if known := rows_of(connection, select(table).where(same), type(row)):
                outcome = Acceptance.ALREADY if known == [row] else Acceptance.OTHER
            else:
                sealed.add(connection, row)
            crashpoint(f"before_{commit}_commit")
        crashpoint(f"after_{commit}_commit")
        return outcome

    def put(self, row: object, commit: str, charge: ChargeRow | None = None) -> None:
        """Keep a row in place of the one with its key.

        Args:
            row: the row.
            commit: names the commit for fault tests.
            charge: what the round costs, if the row lets anybody see a sum. A round is charged only once.
        """
        table, values = TABLE_OF[type(row)], sealed.values_of(row)
        same = and_(*(column == values[column.name] for column in table.primary_key))
        with self._database.transaction() as connection:
            connection.execute(delete(table).where(same))
            sealed.add(connection, row)
            if charge is not None and not connection.execute(select(charges).filter_by(round=charge.round)).first():
                sealed.add(connection, charge)
            crashpoint(f"before_{commit}_commit")
        crashpoint(f"after_{commit}_commit")

    def of_round(self, kind: type[Row], number: int) -> list[Row]:
        """Return a round's rows of one kind, ordered by their keys."""
        table = TABLE_OF[kind]
        return self._database.all(select(table).where(table.c.round == number).order_by(*table.primary_key), kind)


def replace_round(connection: Connection, row: RoundRow) -> None:
    """Replace the row of a round.

    What its kind has kept of it goes with its end.
    """
    sealed.put(connection, row)
    if row.ended_at is not None:
        _forget_ended(connection)
        _forget_commands(connection, row)


def _forget_commands(connection: Connection, ended: RoundRow) -> None:
    """Forget the commands that end with a round.

    Clients that go on are not in its row. Nothing else says that a client has failed.
    """
    known = connection.execute(_COMMANDED, {"job": ended.job_id}).scalars()
    if over := sorted({*known}.intersection(ended.selected)):
        mine = (commands.c.job_id == ended.job_id) & commands.c.client_id.in_(over)
        connection.execute(delete(commands).where(mine))


def _forget_ended(connection: Connection) -> None:
    for statement in _FORGET_ENDED:
        connection.execute(statement)
