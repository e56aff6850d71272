"""Conversion of rows to and from the database, each with a digest.

The law: a row that `rows_of` returns has the values that it was made with. The digest covers the name of the table and
all columns as they are stored, except those that are marked UNCOVERED, and lies in the row's last column. SQLite checks
its own structure, but not values; without digests, a flipped bit would become another number of samples, or another
charge.

Every row is written by `values_of` and read by `rows_of`. What changes a row reads it first (`change`), so that no
damaged row gets a new digest.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any, TypeVar, get_type_hints

from sqlalchemy import (
    ColumnElement,
    Connection,
    Dialect,
    Select,
    Table,
    Update,
    bindparam,
    delete,
    insert,
    select,
    update,
)
from sqlalchemy.exc import OperationalError

from fedring.server.state.failures import StoreError
from fedring.server.state.files import FACTS
from fedring.server.state.rows import JobRow, MetaRow, RoundRow
from fedring.server.state.sql.layout import Layout, layout_of
from fedring.server.state.sql.schema import TABLE_OF
from fedring.server.state.sql.tables import ROW_DIGEST, UNCOVERED_COLUMNS, Convert, kind_of

Row = TypeVar("Row")
Numbered = TypeVar("Numbered", JobRow, RoundRow)

_KEY = "key_"  # begins the names of the parameters that say which row is replaced


@dataclass(frozen=True, slots=True)
class _Form:
    """How rows of a kind are stored."""

    table: str
    names: tuple[str, ...]  # of all fields
    values: Convert  # from a row to the values of all fields
    covered: tuple[str, ...]  # the fields that the digest covers; empty for a table without digests
    layout: Layout
    to_stored: tuple[tuple[str, Convert], ...]  # by name, what makes a field's value one that a column gives back
    from_stored: tuple[tuple[str, Convert], ...]


def values_of(row: Any) -> dict[str, Any]:
    """Return a row's values of all columns, as they are stored."""
    form = _FORMS[type(row)]
    stored = dict(zip(form.names, form.values(row), strict=True))
    for name, convert in form.to_stored:
        stored[name] = convert(stored[name])
    if form.covered:
        stored[ROW_DIGEST] = form.layout.digest(stored)
    return stored


def rows_of(
    connection: Connection, query: Select[Any], kind: type[Row], parameters: Mapping[str, Any] | None = None
) -> list[Row]:
    """Return the rows that a query finds.

    It may leave out columns that the digest does not cover.

    Raises:
        StoreError: "corrupt", if one is not what was written.
    """
    return [row_of(kind, stored) for stored in stored_of(connection, query, kind, parameters)]


def stored_of(
    connection: Connection, query: Select[Any], kind: type[Any], parameters: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Return the stored values of the rows that a query finds, checked.

    Making rows of them takes as long again, so this is for callers who need only a few fields.

    Raises:
        StoreError: "corrupt", if one is not what was written.
    """
    form, rows = _FORMS[kind], list[dict[str, Any]]()
    try:
        result = connection.execute(query, parameters)
        names, found = tuple(result.keys()), result.all()
    except OperationalError as error:
        if "decode to UTF-8" in str(error.orig):
            raise _damaged(kind) from error
        raise
    except TypeError as error:  # SQLAlchemy's, of text where bytes were written
        raise _damaged(kind) from error
    for values in found:
        stored = dict(zip(names, values, strict=True))
        if form.covered and not form.layout.is_sound(stored.pop(ROW_DIGEST), stored):
            raise _damaged(kind, stored)
        rows.append(stored)
    return rows


def covered(kind: type[Any]) -> Select[Any]:
    """Return the query of all rows of a kind.

    It leaves out the columns that the digest does not cover.
    """
    return select(*(TABLE_OF[kind].c[name] for name in (*_FORMS[kind].covered, ROW_DIGEST)))


def row_of(kind: type[Row], stored: Mapping[str, Any]) -> Row:
    """Return the row of values as they are stored, unchecked."""
    values = dict(stored)
    for name, convert in _FORMS[kind].from_stored:
        values[name] = convert(values[name])
    return kind(**values)


def add(connection: Connection, *rows: Any) -> None:
    """Insert rows, which are of one kind."""
    # Their values are what the driver takes: to go through their types once more would take as long as the digests.
    statement, names = _insertion(type(rows[0]), connection.dialect)
    stored = map(values_of, rows)
    connection.exec_driver_sql(statement, [tuple(map(each.__getitem__, names)) if names else each for each in stored])


def _insertion(kind: type[Any], dialect: Dialect) -> tuple[str, Sequence[str]]:
    """Return the insertion of a kind, and the order of its parameters.

    The order is empty if the driver takes them by their names.
    """
    if (known := _INSERTIONS.get((kind, dialect.name))) is None:
        table = TABLE_OF[kind]
        values = {column.name: bindparam(column.name, type_=column.type) for column in table.c}
        compiled = insert(table).values(values).compile(dialect=dialect)
        known = str(compiled), tuple(getattr(compiled, "positiontup", None) or ())
        _INSERTIONS[kind, dialect.name] = known
    return known


def add_numbered(connection: Connection, row: Numbered, key: str) -> Numbered:
    """Insert a row, and return it with its new number."""
    values = values_of(row)
    del values[key]
    (given,) = connection.execute(insert(TABLE_OF[type(row)]), values).inserted_primary_key or (0,)
    changes: dict[str, Any] = {key: given}
    numbered = replace(row, **changes)
    put(connection, numbered)  # The digest covers the number, which the database has just chosen.
    return numbered


def set_meta(connection: Connection, name: str, value: str) -> None:
    """Note a fact about the whole database.

    It replaces an earlier one of that name.
    """
    connection.execute(delete(TABLE_OF[MetaRow]).where(TABLE_OF[MetaRow].c.name == name))
    add(connection, MetaRow(name, value))


def change(connection: Connection, kind: type[Any], which: ColumnElement[bool], **changes: Any) -> None:
    """Change fields of all rows that match `which`.

    Raises:
        StoreError: "corrupt", if one is not what was written. It stays as it is.
    """
    for row in rows_of(connection, select(TABLE_OF[kind]).where(which), kind):
        put(connection, replace(row, **changes))


def put(connection: Connection, row: Any) -> None:
    """Replace the row of the same key.

    Raises:
        StoreError: "corrupt", if there is none: it was there, and nothing that is replaced is ever removed.
    """
    values = values_of(row)
    parameters = values.copy()
    for column in TABLE_OF[type(row)].primary_key:
        parameters[f"{_KEY}{column.name}"] = parameters.pop(column.name)
    if not connection.execute(_REPLACE[type(row)], parameters).rowcount:
        raise _damaged(type(row), values, "is missing")


def check_all(connection: Connection) -> None:
    """Check every row of every table that has digests.

    Raises:
        StoreError: "corrupt", if one is not what was written.
    """
    for kind, form in _FORMS.items():
        connection.execute(select(TABLE_OF[kind]).limit(0))  # The names of all columns lie in the file, too.
        if form.covered:
            rows_of(connection, covered(kind), kind)


def _form(kind: type[Any]) -> _Form:
    hints, own, table = get_type_hints(kind), fields(kind), TABLE_OF[kind]
    names = tuple(field.name for field in own)
    covered = tuple(name for name in names if name not in table.info[UNCOVERED_COLUMNS])
    kinds = {name: kind_of(hints[name])[0] for name in names}
    to_stored = tuple((name, kind.to_stored) for name, kind in kinds.items() if kind.to_stored)
    from_stored = tuple((name, kind.from_stored) for name, kind in kinds.items() if kind.from_stored)
    layout = layout_of(table, covered)
    covered = covered if ROW_DIGEST in table.c else ()
    return _Form(table.name, names, attrgetter(*names), covered, layout, to_stored, from_stored)


def _replacement(table: Table) -> Update:
    same = (column == bindparam(f"{_KEY}{column.name}", type_=column.type) for column in table.primary_key)
    # The key stays: to set it, even to what it is, SQLite would go through all rows that refer to it.
    others = [column for column in table.c if not column.primary_key]
    return update(table).where(*same).values({column.name: bindparam(column.name) for column in others})


_FORMS = {kind: _form(kind) for kind in TABLE_OF}
# To write such a statement down takes longer than to execute it.
_INSERTIONS: dict[tuple[type[Any], str], tuple[str, Sequence[str]]] = {}  # by the kind of rows and the dialect
_REPLACE = {kind: _replacement(table) for kind, table in TABLE_OF.items()}


def _damaged(
    kind: type[Any], stored: Mapping[str, Any] | None = None, what: str = "is not what was written"
) -> StoreError:
    """Return the error of a damaged row.

    `stored` is None if even its key cannot be read.
    """
    table = TABLE_OF[kind]
    key = ", ".join(f"{column.name} {stored[column.name]!r}" for column in table.primary_key) if stored else ""
    which = f"the row of {key}" if key else "a row"
    text = f"the database is damaged ({which} in the table {table.name} of {FACTS} {what})"
    return StoreError("corrupt", f"{text}: restore a backup (flctl restore)")
