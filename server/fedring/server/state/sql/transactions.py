"""Transactions over one database, which the stores of all concerns share."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Engine, Select

from fedring.server.state.sql.database import UNREADABLE, translate
from fedring.server.state.sql.sealed import Row, rows_of


class Database:
    """An open database.

    A transaction may change rows of several concerns: it is one, whatever functions it is passed to.

    Attributes:
        engine: SQLAlchemy's.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """Commit the changes made within, unless that raises."""
        try:
            with self.engine.begin() as connection:
                yield connection
        except UNREADABLE as error:
            raise translate(error) from error

    def all(self, query: Select[Any], kind: type[Row]) -> list[Row]:
        """Return the rows that a query finds."""
        with self.transaction() as connection:
            return rows_of(connection, query, kind)

    def first(self, query: Select[Any], kind: type[Row]) -> Row | None:
        """Return the first row that a query finds, or None."""
        return next(iter(self.all(query.limit(1), kind)), None)
