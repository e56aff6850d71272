"""The tables of the rows, each derived from its dataclass.

Every run fills them; `schema` adds those of some kinds of rounds. The dataclasses are in `fedring.server.state.rows`.
SQLAlchemy can map a class to a table itself, but not a frozen one: it keeps notes about each object, which it changes.
Rows are values, which several threads share. So the columns are made here, of the dataclass's fields.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from sqlalchemy import (
    REAL,
    BigInteger,
    Column,
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
from sqlalchemy.types import TypeEngine

from fedring.server.state.rows import (
    NOT_APPROVED,
    ChargeRow,
    ClientRow,
    CommandRow,
    EvaluationRow,
    EventRow,
    JobRow,
    MetaRow,
    ModelRow,
    PacketSpec,
    RoundRow,
    TokenRow,
    UpdateRow,
)

ROW_DIGEST = "row_digest"
"""The column of a row's own digest (`fedring.server.state.sql.sealed`)."""

UNCOVERED_COLUMNS = "uncovered"
"""The name, in a table's `info`, of the columns that the digest does not cover."""

Convert = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Kind:
    """How the values of a field are stored."""

    column: type[TypeEngine[Any]] | TypeEngine[Any]
    to_stored: Convert | None = None  # makes a value one that the column gives back as it is; None = it is one
    from_stored: Convert | None = None


METADATA = MetaData()


def define(name: str, row: type, *keys: str, digest: bool = True, numbered: bool = False, **parts: Any) -> Table:
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
            kind.column,
            *(ForeignKey(refers[field.name]) for _ in range(field.name in refers)),
            primary_key=field.name in keys,
            nullable=nullable,
            autoincrement=numbered and field.name in keys,
        )
        for field in fields(row)
        for kind, nullable in [kind_of(hints[field.name])]
    ]
    if digest:
        columns.append(Column(ROW_DIGEST, LargeBinary, nullable=False))
    table = Table(name, METADATA, *columns, *parts.get("others", ()), sqlite_strict=True, sqlite_autoincrement=numbered)
    table.info["row"] = row
    table.info[UNCOVERED_COLUMNS] = [field.name for field in fields(row) if not field.metadata.get("covered", True)]
    return table


def kind_of(hint: Any) -> tuple[Kind, bool]:
    """Return the storage type of a field, and whether it is nullable.

    The column of a nullable field may be NULL.
    """
    optional = NoneType in get_args(hint)
    (bare,) = [choice for choice in get_args(hint) if choice is not NoneType] if optional else [hint]
    kind = _KINDS[get_origin(bare) if get_origin(bare) in (dict, list) else bare]
    return kind, optional and kind is not _JSON  # which has a null of its own


def _real(value: float | None) -> float | None:
    """Return the number that a real column gives back.

    It is 1.0 for 1, and has no sign of zero.
    """
    return None if value is None else float(value) + 0.0


@lru_cache  # most clients of a round lay their payloads out in the same way
def _packets_to_json(packets: tuple[PacketSpec, ...]) -> str:
    return _to_json([(p.vector, p.kind, p.encoding, p.offset, p.bytes) for p in packets])


@lru_cache
def _packets_of(text: str) -> tuple[PacketSpec, ...]:
    return tuple(PacketSpec(*packet) for packet in json.loads(text))


def _names_of(text: str) -> tuple[str, ...]:
    return tuple(json.loads(text))


_to_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_JSON = Kind(Text, _to_json, json.loads)
_KINDS: dict[Any, Kind] = {
    int: Kind(BigInteger().with_variant(Integer(), "sqlite"), int),  # STRICT knows INTEGER, REAL, TEXT and BLOB only
    float: Kind(Double().with_variant(REAL(), "sqlite"), _real),
    str: Kind(
        Text().with_variant(Text(collation="C"), "postgresql")
    ),  # in the order of bytes, as SQLite's and Python's
    bytes: Kind(LargeBinary),
    dict: _JSON,
    list: _JSON,
    tuple[str, ...]: Kind(Text, _to_json, _names_of),
    tuple[PacketSpec, ...]: Kind(Text, _packets_to_json, _packets_of),
}

meta = define("meta", MetaRow, "name")
jobs = define("jobs", JobRow, "job_id", numbered=True, others=[UniqueConstraint("idempotency_key")])
rounds = define(
    "rounds",
    RoundRow,
    "round",
    numbered=True,
    refers={"job_id": "jobs.job_id"},
    others=[Index("rounds_by_job", "job_id")],
)
updates = define(
    "updates",
    UpdateRow,
    "round",
    "client_id",
    refers={"round": "rounds.round", "buffer": "rounds.round"},
    others=[Index("one_of_each_client", "buffer", "client_id", unique=True)],
)
commands = define("commands", CommandRow, "job_id", "client_id", refers={"job_id": "jobs.job_id"})
models = define("models", ModelRow, "version")
evaluations = define("evaluations", EvaluationRow, "version", "client_id")
events = define("events", EventRow, "id", digest=False)  # they only tell people what has happened
charges = define("charges", ChargeRow, "round")
clients = define("clients", ClientRow, "client_id")
tokens = define("tokens", TokenRow, "token_id")

COUNTED = rounds.c.ended_at.is_not(None) & (rounds.c.reason != NOT_APPROVED)
"""Rounds that their jobs count as ended."""

PUBLISHED = rounds.c.model_version > 0
