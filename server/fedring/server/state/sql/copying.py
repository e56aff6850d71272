"""Copies of all tables of a database in another one.

It may be of another kind: SQLite or PostgreSQL.

The law: each row has the same stored values in both, and so the same digest, and each counter of numbers goes on where
the first one was: a number that was given once is never given again.
"""

from collections.abc import Iterator
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, Table, func, insert, select, text

from fedring.codec.digest import is_called
from fedring.server.state.failures import StoreError
from fedring.server.state.files import FACTS
from fedring.server.state.sql import sealed
from fedring.server.state.sql.database import VERSION, make_tables
from fedring.server.state.sql.tables import METADATA, meta, updates

_BATCH = 100  # rows in memory at a time: one of an update may hold its payload


def copy_tables(source: Connection, target: Connection) -> None:
    """Copy all rows into a database without tables.

    Args:
        source: Whose tables have the version that this program writes.
        target: In a transaction, which the caller commits.

    Raises:
        StoreError: "corrupt", if a row of the copy is not what was written, or is missing.
    """
    make_tables(target)
    for table in METADATA.sorted_tables:
        for part in _parts(source, _all_of(table)):
            target.execute(insert(table), part)
        if count(target, table) != count(source, table):
            raise StoreError("corrupt", f"not all rows of the table {table.name} were copied")
        if (column := table.autoincrement_column) is not None:
            _go_on(target, table, column.name, _last_number(source, table, column.name))
    check_rows(target)


def count(connection: Connection, table: Table) -> int:
    """Return how many rows of a table are the state's own."""
    query = select(func.count()).select_from(_all_of(table).subquery())
    return int(connection.execute(query).scalar_one())


def check_rows(connection: Connection) -> None:
    """Check all rows, with the payloads of small updates.

    They hold the values that were written.

    Raises:
        StoreError: "corrupt", if one does not.
    """
    sealed.check_all(connection)
    of_payloads: list[ColumnElement[Any]] = [updates.c.round, updates.c.client_id, updates.c.digest, updates.c.payload]
    for part in _parts(connection, select(*of_payloads).where(updates.c.blob == "")):
        for row in part:
            if not is_called(row["payload"], row["digest"]):
                what = f"the update of {row['client_id']} in round {row['round']}, in {FACTS},"
                raise StoreError("corrupt", f"{what} does not hold what was written to it")


def _parts(connection: Connection, query: Select[Any]) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows that a query finds, some at a time."""
    with connection.execute(query, execution_options={"yield_per": _BATCH}) as found:
        try:
            for part in found.mappings().partitions():
                yield [dict(row) for row in part]
        except TypeError as error:  # SQLAlchemy's, of text where bytes were written
            raise StoreError("corrupt", f"the database is damaged ({error})") from error


def _all_of(table: Table) -> Select[Any]:
    """Return the query of all rows but the version's.

    SQLite keeps that one elsewhere.
    """
    return select(table).where(meta.c.name != VERSION) if table is meta else select(table)


def _last_number(connection: Connection, table: Table, column: str) -> int:
    """Return the last number that a table's counter has given."""
    if connection.dialect.name == "sqlite":
        query = text("SELECT seq FROM sqlite_sequence WHERE name = :table")
        return int(connection.execute(query, {"table": table.name}).scalar() or 0)
    names = {"table": table.name, "column": column}
    counter = connection.execute(text("SELECT pg_get_serial_sequence(:table, :column)"), names).scalar_one()
    last, given = connection.exec_driver_sql(f"SELECT last_value, is_called FROM {counter}").one()
    return int(last) if given else 0


def _go_on(connection: Connection, table: Table, column: str, last: int) -> None:
    """Let a table's counter go on after a number."""
    names = {"table": table.name, "column": column, "last": last}
    if connection.dialect.name == "sqlite":
        connection.execute(text("DELETE FROM sqlite_sequence WHERE name = :table"), names)
        connection.execute(text("INSERT INTO sqlite_sequence (name, seq) VALUES (:table, :last)"), names)
    elif last:
        connection.execute(text("SELECT setval(pg_get_serial_sequence(:table, :column), :last)"), names)
