"""Rows on their way to and from the database, each with a digest of its own.

The law: a row that `rows_of` returns has the values that it was made with. The digest covers the kind of the row and
all its fields, except those that are marked UNCOVERED, and lies in the row's last column. SQLite checks its own
structure, but not values; without digests, a flipped bit would become another number of samples, or another charge.

Every row is written by `values_of` and read by `rows_of`. What changes a row reads it first (`change`), so that no
damaged row gets a new digest.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar, get_type_hints

from blake3 import blake3
from sqlalchemy import ColumnElement, Connection, Select, and_, insert, select, update

from fedring.server.state.failures import StoreError
from fedring.server.state.files import FACTS
from fedring.server.state.rows import PacketSpec
from fedring.server.state.tables import ROW_DIGEST, TABLE_OF

Row = TypeVar("Row")

_DIGEST_BYTES = 16
_UNREADABLE = (ValueError, TypeError, RecursionError)  # what JSON that is not what was written can lead to


@dataclass(frozen=True, slots=True)
class _Form:
    """What is known of a kind of rows."""

    names: tuple[str, ...]  # of all fields
    covered: tuple[tuple[str, Callable[[Any], Any] | None], ...]  # names, and what makes a number one of its column
    has_digest: bool


def row_digest(row: Any) -> bytes:
    """Return the digest of a row: it depends on nothing but the values, whatever the database makes of them."""
    found = [type(row).__name__]
    for name, number in _FORMS[type(row)].covered:
        value = getattr(row, name)
        found.append(value if number is None or value is None else number(value))
    return blake3(_to_text(found).encode()).digest(_DIGEST_BYTES)


def values_of(row: Any) -> dict[str, Any]:
    """Return the values of all columns for a row."""
    form = _FORMS[type(row)]
    values = {name: getattr(row, name) for name in form.names}
    if form.has_digest:
        values[ROW_DIGEST] = row_digest(row)
    return values


def rows_of(connection: Connection, query: Select[Any], kind: type[Row]) -> list[Row]:
    """Return the rows that a query finds. It may leave out columns that the digest does not cover.

    Raises:
        StoreError: "corrupt", if one is not what was written.
    """
    form, rows = _FORMS[kind], []
    try:
        for mapping in connection.execute(query).mappings():
            values = dict(mapping)
            digest = values.pop(ROW_DIGEST, None)
            row = kind(**values)
            if form.has_digest and row_digest(row) != digest:
                raise _damaged(kind, row)
            rows.append(row)
    except _UNREADABLE as error:
        raise _damaged(kind) from error
    return rows


def add(connection: Connection, *rows: Any) -> None:
    """Insert rows, which are of one kind."""
    connection.execute(insert(TABLE_OF[type(rows[0])]), [values_of(row) for row in rows])


def change(connection: Connection, kind: type[Any], which: ColumnElement[bool], **changes: Any) -> None:
    """Change fields of all rows that match `which`.

    Raises:
        StoreError: "corrupt", if one is not what was written. It stays as it is.
    """
    for row in rows_of(connection, select(TABLE_OF[kind]).where(which), kind):
        put(connection, replace(row, **changes))


def put(connection: Connection, row: Any) -> None:
    """Replace the row of the same key. Nothing happens if there is none."""
    table = TABLE_OF[type(row)]
    same = and_(*(column == getattr(row, column.name) for column in table.primary_key))
    connection.execute(update(table).where(same).values(values_of(row)))


def check_all(connection: Connection) -> None:
    """Check every row of every table that has digests.

    Raises:
        StoreError: "corrupt", if one is not what was written.
    """
    for kind, form in _FORMS.items():
        wanted = {ROW_DIGEST, *(name for name, _ in form.covered)}
        if form.has_digest:
            rows_of(connection, select(*(column for column in TABLE_OF[kind].c if column.name in wanted)), kind)


def _form(kind: type[Any]) -> _Form:
    hints, columns = get_type_hints(kind), fields(kind)
    covered = [field.name for field in columns if field.metadata.get("covered", True)]
    form = tuple((name, _number(hints[name])) for name in covered)
    return _Form(tuple(field.name for field in columns), form, ROW_DIGEST in TABLE_OF[kind].c)


def _number(hint: Any) -> Callable[[Any], Any] | None:
    """Return what turns a number into the one that a column of this type gives back; None for no number."""
    if hint in (float, float | None):
        return _real  # the column returns 1.0 for 1
    return int if hint in (int, int | None) else None


def _real(value: float) -> float:
    return float(value) + 0.0  # SQLite keeps no sign of zero


def _plain(value: Any) -> Any:
    if isinstance(value, PacketSpec):
        return [value.vector, value.kind, value.encoding, value.offset, value.bytes]
    return bytes(value).hex()


_FORMS = {kind: _form(kind) for kind in TABLE_OF}
_to_text = json.JSONEncoder(separators=(",", ":"), default=_plain).encode


def _damaged(kind: type[Any], row: Any = None) -> StoreError:
    """Return the error of a row that is not what was written; None if even its key cannot be read."""
    table = TABLE_OF[kind]
    key = ", ".join(f"{column.name} {getattr(row, column.name)!r}" for column in table.primary_key) if row else ""
    which = f"the row of {key}" if key else "a row"
    text = f"the database is damaged ({which} in the table {table.name} of {FACTS} is not what was written)"
    return StoreError("corrupt", f"{text}: restore a backup (flctl restore)")
