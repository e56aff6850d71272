"""The rounds in the database, and rows that their kinds keep.

The latter go with the end of the round.
"""

import time

from sqlalchemy import Connection, and_, delete, select

from fedring.daemon.crash import crashpoint
from fedring.server.state.interfaces import Acceptance, Kept, RoundBound
from fedring.server.state.rows import ChargeRow, ModelRow, RoundRow
from fedring.server.state.sql import sealed
from fedring.server.state.sql.schema import KEPT, TABLE_OF
from fedring.server.state.sql.sealed import rows_of
from fedring.server.state.sql.tables import charges, jobs, models, rounds
from fedring.server.state.sql.transactions import Database


class SqlRounds:
    """The rounds of a run; RoundStore documents each method."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, row: RoundRow) -> RoundRow:
        with self._database.transaction() as connection:
            return sealed.add_numbered(connection, row, "round")

    def replace(self, row: RoundRow) -> None:
        with self._database.transaction() as connection:
            replace_round(connection, row)

    def save_seconds_left(self, number: int, phase: str, seconds: float) -> None:
        this = (rounds.c.round == number) & (rounds.c.phase == phase)
        with self._database.transaction() as connection:
            sealed.change(connection, RoundRow, this, seconds_left=seconds)

    def get(self, number: int) -> RoundRow | None:
        return self._database.first(select(rounds).where(rounds.c.round == number), RoundRow)

    def newest(self, limit: int = 100, job_id: int = 0, below: int = 0) -> list[RoundRow]:
        query = select(rounds).order_by(rounds.c.round.desc()).limit(limit)
        if below:
            query = query.where(rounds.c.round < below)
        return self._database.all(query.where(rounds.c.job_id == job_id) if job_id else query, RoundRow)

    def ended_of(self, job_id: int) -> int:
        ended = (rounds.c.job_id == job_id) & rounds.c.ended_at.is_not(None)
        last = self._database.first(select(rounds).where(ended).order_by(rounds.c.job_round.desc()), RoundRow)
        return last.job_round if last else 0

    def last_published(self, job_id: int) -> RoundRow | None:
        published = (rounds.c.job_id == job_id) & (rounds.c.model_version > 0)
        return self._database.first(select(rounds).where(published).order_by(rounds.c.round.desc()), RoundRow)

    def newest_open(self) -> RoundRow | None:
        query = select(rounds).where(rounds.c.ended_at.is_(None)).order_by(rounds.c.round.desc())
        return self._database.first(query, RoundRow)

    def end_orphans(self) -> None:
        running = select(jobs.c.job_id).where(jobs.c.state == "running")
        orphans = rounds.c.ended_at.is_(None) & rounds.c.job_id.not_in(running.scalar_subquery())
        with self._database.transaction() as connection:
            ended = {"phase": "abandoned", "reason": "job_ended", "ended_at": time.time()}
            sealed.change(connection, RoundRow, orphans, **ended)
            _forget_ended(connection)

    def save_evaluation(self, row: RoundRow) -> None:
        published = models.c.version == row.model_version
        with self._database.transaction() as connection:
            replace_round(connection, row)
            sealed.change(connection, ModelRow, published, metrics=row.stats.get("metrics", {}))

    def charges(self) -> list[ChargeRow]:
        return self._database.all(select(charges).order_by(charges.c.round), ChargeRow)


class SqlKept:
    """The rows that kinds of rounds keep; KeptStore documents each method."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, row: RoundBound, commit: str) -> Acceptance:
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

    def put(self, row: RoundBound, commit: str, charge: ChargeRow | None = None) -> None:
        table, values = TABLE_OF[type(row)], sealed.values_of(row)
        same = and_(*(column == values[column.name] for column in table.primary_key))
        with self._database.transaction() as connection:
            connection.execute(delete(table).where(same))
            sealed.add(connection, row)
            if charge is not None and not connection.execute(select(charges).filter_by(round=charge.round)).first():
                sealed.add(connection, charge)
            crashpoint(f"before_{commit}_commit")
        crashpoint(f"after_{commit}_commit")

    def of_round(self, kind: type[Kept], number: int) -> list[Kept]:
        table = TABLE_OF[kind]
        return self._database.all(select(table).where(table.c.round == number).order_by(*table.primary_key), kind)


def replace_round(connection: Connection, row: RoundRow) -> None:
    """Replace the row of a round.

    What its kind has kept of it goes with its end.
    """
    sealed.put(connection, row)
    if row.ended_at is not None:
        _forget_ended(connection)


def _forget_ended(connection: Connection) -> None:
    opened = select(rounds.c.round).where(rounds.c.ended_at.is_(None))
    for table in KEPT:
        connection.execute(delete(table).where(table.c.round.not_in(opened)))
