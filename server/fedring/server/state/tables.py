"""The tables that hold the rows, each derived from the dataclass of its rows (`fedring.server.state.rows`).

SQLAlchemy can map a class to a table itself, but not a frozen one: it keeps notes about each object, which it changes.
Rows are values, which several threads share. So the columns are made here, of the dataclass's fields.
"""

import json
from dataclasses import fields
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from sqlalchemy import (
    REAL,
    BigInteger,
    Column,
    Dialect,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
)
from sqlalchemy.types import TypeDecorator, TypeEngine

from fedring.server.state.rows import (
    ChargeRow,
    ClientRow,
    EvaluationRow,
    EventRow,
    JobRow,
    MetaRow,
    ModelRow,
    PacketSpec,
    RoundRow,
    SecureMessageRow,
    SecureRoundRow,
    TokenRow,
    UpdateRow,
)

ROW_DIGEST = "row_digest"
"""The column of a row's own digest (`fedring.server.state.sealed`)."""

_to_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


class _Json(TypeDecorator[Any]):
    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str:
        return _to_json(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        return json.loads(value or "null")


class _Names(_Json):
    cache_ok = True

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        return tuple(json.loads(value or "[]"))


class _Packets(_Json):
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str:
        return _to_json([(p.vector, p.kind, p.encoding, p.offset, p.bytes) for p in value])

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        return tuple(PacketSpec(*packet) for packet in json.loads(value or "[]"))


_KINDS: dict[Any, type[TypeEngine[Any]] | TypeEngine[Any]] = {
    int: BigInteger().with_variant(Integer(), "sqlite"),  # STRICT knows INTEGER, REAL, TEXT and BLOB only
    float: Double().with_variant(REAL(), "sqlite"),
    str: Text,
    bytes: LargeBinary,
    dict: _Json,
    list: _Json,
    tuple[str, ...]: _Names,
    tuple[PacketSpec, ...]: _Packets,
}
METADATA = MetaData()


def _table(name: str, row: type, *keys: str, digest: bool = True, numbered: bool = False, **parts: Any) -> Table:
    """Define a table with a column for each field of a row.

    Args:
        name: of the table.
        row: the dataclass of its rows.
        keys: the fields of the primary key.
        digest: whether its rows have digests.
        numbered: whether the database numbers the rows, and gives no number twice.
        parts: `refers`, the foreign key of each field that has one, and `others`, constraints and indexes.
    """
    refers, hints = parts.get("refers", {}), get_type_hints(row)
    columns = [
        Column(
            field.name,
            _KINDS[kind],
            *(ForeignKey(refers[field.name]) for _ in range(field.name in refers)),
            primary_key=field.name in keys,
            nullable=nullable,
            autoincrement=numbered and field.name in keys,
        )
        for field in fields(row)
        for kind, nullable in [_kind_of(hints[field.name])]
    ]
    if digest:
        columns.append(Column(ROW_DIGEST, LargeBinary, nullable=False))
    table = Table(name, METADATA, *columns, *parts.get("others", ()), sqlite_strict=True, sqlite_autoincrement=numbered)
    table.info["row"] = row
    return table


def _kind_of(hint: Any) -> tuple[Any, bool]:
    """Return the key in _KINDS for the type of a field, and whether its column may be NULL."""
    choices = [choice for choice in get_args(hint) if choice is not NoneType] if NoneType in get_args(hint) else [hint]
    (kind,) = choices
    kind = get_origin(kind) if get_origin(kind) in (dict, list) else kind
    return kind, kind is not hint and kind not in (dict, list)  # JSON has a null of its own


meta = _table("meta", MetaRow, "name")
jobs = _table("jobs", JobRow, "job_id", numbered=True, others=[UniqueConstraint("idempotency_key")])
rounds = _table(
    "rounds",
    RoundRow,
    "round",
    numbered=True,
    refers={"job_id": "jobs.job_id"},
    others=[Index("rounds_by_job", "job_id")],
)
updates = _table("updates", UpdateRow, "round", "client_id", refers={"round": "rounds.round"})
models = _table("models", ModelRow, "version")
evaluations = _table("evaluations", EvaluationRow, "version", "client_id")
events = _table("events", EventRow, "id", digest=False)  # they only tell people what has happened
charges = _table("charges", ChargeRow, "round")
clients = _table("clients", ClientRow, "client_id")
tokens = _table("tokens", TokenRow, "token_id")
secure_messages = _table(
    "secure_messages", SecureMessageRow, "round", "client_id", "kind", refers={"round": "rounds.round"}
)
secure_rounds = _table("secure_rounds", SecureRoundRow, "round", refers={"round": "rounds.round"})


TABLE_OF: dict[type, Table] = {table.info["row"]: table for table in METADATA.sorted_tables}
"""The table of each kind of rows."""
