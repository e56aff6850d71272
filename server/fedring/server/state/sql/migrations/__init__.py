"""Steps from the tables of released versions to the newest.

The law: one transaction makes all steps, so a process that is killed leaves the old tables or the new ones. Every row
is checked by its old digest first, and gets its new one last: a damaged row is refused, and stays as it is.

A step is a module whose `upgrade` gets Alembic's operations. Only tables of released versions have steps;
CONTRIBUTING.md says how to add one.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import Connection, MetaData, Table, bindparam, select, update

from fedring.daemon.crash import crashpoint
from fedring.server.state.failures import StoreError
from fedring.server.state.sql.layout import Layout, layout_of
from fedring.server.state.sql.migrations import to_19
from fedring.server.state.sql.tables import METADATA, ROW_DIGEST, UNCOVERED_COLUMNS

logging.getLogger("alembic").setLevel(logging.WARNING)  # it would tell operators about its parts

STEPS: Mapping[int, Callable[[Operations], None]] = {19: to_19.upgrade}
"""By the version of the tables that a step makes, from those of the one before."""


def migrate(connection: Connection, found: int) -> None:
    """Make tables those of the newest version.

    The caller commits, and notes the new version.

    Args:
        connection: In a transaction, while nobody else uses the tables.
        found: The version of the tables, a released one.

    Raises:
        StoreError: "corrupt", if a row is not what was written.
    """
    for layout, table in _layouts(connection):
        _check(connection, layout, table)
    crashpoint("migration_checked")
    operations = Operations(MigrationContext.configure(connection, opts={"transactional_ddl": True}))
    for version, upgrade in sorted(STEPS.items()):
        if version > found:
            upgrade(operations)
    for layout, table in _layouts(connection):
        _seal(connection, layout, table)


def _layouts(connection: Connection) -> list[tuple[Layout, Table]]:
    """Return the tables whose rows have digests, as they are now."""
    there = MetaData()
    there.reflect(connection)
    tables = [table for table in there.sorted_tables if ROW_DIGEST in table.c]
    return [(layout_of(table, _covered(table)), table) for table in tables]


def _covered(table: Table) -> list[str]:
    left_out = {ROW_DIGEST, *METADATA.tables[table.name].info[UNCOVERED_COLUMNS]}
    return [column.name for column in table.columns if column.name not in left_out]


def _check(connection: Connection, layout: Layout, table: Table) -> None:
    for row in _rows(connection, table, ROW_DIGEST):
        if not layout.is_sound(row[ROW_DIGEST], row):
            key = ", ".join(f"{column.name} {row[column.name]!r}" for column in table.primary_key)
            what = f"the row of {key} in the table {table.name} is not what was written"
            raise StoreError("corrupt", f"the database is damaged ({what}): restore a backup (flctl restore)")


def _seal(connection: Connection, layout: Layout, table: Table) -> None:
    keys = list(table.primary_key)
    sealed = [
        {f"key_{key.name}": row[key.name] for key in keys} | {"sealed": layout.digest(row)}
        for row in _rows(connection, table)
    ]
    if sealed:
        same = [key == bindparam(f"key_{key.name}") for key in keys]
        connection.execute(update(table).where(*same).values({ROW_DIGEST: bindparam("sealed")}), sealed)


def _rows(connection: Connection, table: Table, *others: str) -> list[dict[str, Any]]:
    """Return the covered columns of all rows, and others."""
    found = connection.execute(select(*(table.c[name] for name in (*_covered(table), *others))))
    return [dict(row) for row in found.mappings()]
