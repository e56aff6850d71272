"""The tables that hold the rows. Each field of a row has a column of the same name."""

import json
from typing import Any

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

from fedring.server.state.rows import PacketSpec

_to_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


class _Json(TypeDecorator[Any]):
    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str:
        return _to_json(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        return json.loads(value or "null")


class _Names(_Json):
    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        return tuple(json.loads(value or "[]"))


class _Packets(_Json):
    def process_bind_param(self, value: Any, dialect: Dialect) -> str:
        return _to_json([(p.vector, p.kind, p.encoding, p.offset, p.bytes) for p in value])

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        return tuple(PacketSpec(*packet) for packet in json.loads(value or "[]"))


_INT: TypeEngine[int] = BigInteger().with_variant(Integer(), "sqlite")  # STRICT knows INTEGER, REAL, TEXT and BLOB only
_FLOAT: TypeEngine[float] = Double().with_variant(REAL(), "sqlite")
METADATA = MetaData()


def _column(name: str, kind: Any, *constraints: Any, key: bool = False, null: bool = False) -> Column[Any]:
    return Column(name, kind, *constraints, primary_key=key, nullable=null)


meta = Table(
    "meta",
    METADATA,
    _column("name", Text, key=True),
    _column("value", Text),
    sqlite_strict=True,
)
jobs = Table(
    "jobs",
    METADATA,
    _column("job_id", _INT, key=True),
    _column("name", Text),
    _column("spec", _Json),
    _column("rounds", _INT),
    _column("created_at", _FLOAT),
    _column("state", Text),
    _column("reason", Text),
    _column("rounds_done", _INT),
    _column("idempotency_key", Text, null=True),
    _column("start_version", _INT),
    _column("residual_after", _INT),
    _column("residual_epoch", _INT),
    UniqueConstraint("idempotency_key"),
    sqlite_strict=True,
    sqlite_autoincrement=True,
)
rounds = Table(
    "rounds",
    METADATA,
    _column("round", _INT, key=True),
    _column("job_id", _INT, ForeignKey("jobs.job_id")),
    _column("job_round", _INT),
    _column("phase", Text),
    _column("started_at", _FLOAT),
    _column("base_version", _INT),
    _column("model_version", _INT),
    _column("reason", Text),
    _column("selected", _Names),
    _column("ended_at", _FLOAT, null=True),
    _column("stats", _Json),
    _column("seconds_left", _FLOAT, null=True),
    _column("settings", _Json),
    Index("rounds_by_job", "job_id"),
    sqlite_strict=True,
    sqlite_autoincrement=True,
)
updates = Table(
    "updates",
    METADATA,
    _column("round", _INT, ForeignKey("rounds.round"), key=True),
    _column("client_id", Text, key=True),
    _column("digest", Text),
    _column("packets", _Packets),
    _column("num_samples", _INT),
    _column("total_bytes", _INT),
    _column("train_seconds", _FLOAT),
    _column("norm", _FLOAT),
    _column("accepted_at", _FLOAT),
    _column("metrics", _Json),
    _column("blob", Text),
    _column("payload", LargeBinary),
    _column("name", Text),
    _column("epoch", _INT),
    _column("control_previous", Text),
    sqlite_strict=True,
)
models = Table(
    "models",
    METADATA,
    Column("version", _INT, primary_key=True, autoincrement=False),
    _column("round", _INT),
    _column("digest", Text),
    _column("blob", Text),
    _column("schema_hash", Text),
    _column("parameters", _INT),
    _column("bytes", _INT),
    _column("created_at", _FLOAT),
    _column("base_version", _INT),
    _column("delta_blob", Text),
    _column("delta_packets", _Packets),
    _column("residual_blob", Text),
    _column("optimizer_blob", Text),
    _column("base_digest", Text),
    _column("job_id", _INT),
    _column("metrics", _Json),
    _column("frozen_digest", Text),
    _column("control_blob", Text),
    _column("control_digest", Text),
    _column("control_line", Text),
    _column("spread_blob", Text),
    sqlite_strict=True,
)
evaluations = Table(
    "evaluations",
    METADATA,
    Column("version", _INT, primary_key=True, autoincrement=False),
    _column("client_id", Text, key=True),
    _column("round", _INT),
    _column("correct", _INT),
    _column("total", _INT),
    _column("loss_sum", _FLOAT),
    _column("classified", _INT),
    _column("metrics", _Json),
    sqlite_strict=True,
)
events = Table(
    "events",
    METADATA,
    Column("id", _INT, primary_key=True, autoincrement=False),
    _column("at", _FLOAT),
    _column("kind", Text),
    _column("text", Text),
    _column("job_id", _INT),
    _column("round", _INT),
    _column("client_id", Text),
    sqlite_strict=True,
)
charges = Table(
    "charges",
    METADATA,
    _column("round", _INT, key=True),
    _column("job_id", _INT),
    _column("noise_multiplier", _FLOAT),
    _column("next_clip", _FLOAT),
    _column("charged_at", _FLOAT),
    _column("charge", Text),
    sqlite_strict=True,
)
clients = Table(
    "clients",
    METADATA,
    _column("client_id", Text, key=True),
    _column("pruned_updates", _INT),
    _column("last_epoch", _INT),
    _column("last_round", _INT),
    _column("last_name", Text),
    sqlite_strict=True,
)
tokens = Table(
    "tokens",
    METADATA,
    _column("token_id", Text, key=True),
    _column("digest", Text),
    _column("role", Text),
    _column("name", Text),
    _column("created_at", _FLOAT),
    _column("expires_at", _FLOAT, null=True),
    _column("revoked_at", _FLOAT, null=True),
    sqlite_strict=True,
)
secure_messages = Table(
    "secure_messages",
    METADATA,
    _column("round", _INT, ForeignKey("rounds.round"), key=True),
    _column("client_id", Text, key=True),
    _column("kind", Text, key=True),
    _column("body", LargeBinary),
    sqlite_strict=True,
)
secure_rounds = Table(
    "secure_rounds",
    METADATA,
    Column("round", _INT, ForeignKey("rounds.round"), primary_key=True, autoincrement=False),
    _column("epoch", _INT),
    _column("groups", _Json),
    sqlite_strict=True,
)
