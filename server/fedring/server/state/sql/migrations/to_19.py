"""The step from the tables of 0.2.0 to those of 1.0.0."""

from typing import Any

from alembic.operations import Operations
from sqlalchemy import (
    REAL,
    BigInteger,
    Column,
    Double,
    ForeignKey,
    Integer,
    LargeBinary,
    Text,
    text,
)
from sqlalchemy.types import TypeEngine

_WHOLE = BigInteger().with_variant(Integer(), "sqlite")
_REAL: TypeEngine[float] = Double().with_variant(REAL(), "sqlite")
_TEXT = Text().with_variant(Text(collation="C"), "postgresql")
_KEPT = (
    "round, client_id, digest, name, packets, num_samples, total_bytes, train_seconds, norm, accepted_at, metrics, "
    "blob, payload, epoch, control_previous"
)
"""The columns that the updates of 0.2.0 have."""


def upgrade(op: Operations) -> None:
    """Add signed jobs and their order, overrides, and commands that outlive rounds."""
    empty = text("x''" if op.get_context().dialect.name == "sqlite" else "''")
    op.add_column("jobs", Column("place", _WHOLE, nullable=False, server_default="0"))
    op.add_column("jobs", Column("signed", LargeBinary, nullable=False, server_default=empty))
    op.add_column("rounds", Column("overrides", Text, nullable=False, server_default="{}"))
    # In SQLite a new column that refers to a table can only be NULL, so this table is made anew.
    op.rename_table("updates", "updates_before")
    op.create_table(
        "updates",
        Column("round", _WHOLE, ForeignKey("rounds.round"), primary_key=True, autoincrement=False),
        Column("client_id", _TEXT, primary_key=True),
        *_columns(_TEXT, "digest", "name"),
        *_columns(Text(), "packets"),
        *_columns(_WHOLE, "num_samples", "total_bytes"),
        *_columns(_REAL, "train_seconds", "norm", "accepted_at"),
        *_columns(Text(), "metrics"),
        *_columns(_TEXT, "blob"),
        *_columns(LargeBinary(), "payload"),
        *_columns(_WHOLE, "epoch"),
        *_columns(_TEXT, "control_previous"),
        Column("buffer", _WHOLE, ForeignKey("rounds.round"), nullable=False),
        *_columns(_WHOLE, "staleness"),
        *_columns(LargeBinary(), "row_digest"),
        sqlite_strict=True,
    )
    columns = f"{_KEPT}, row_digest"  # the digests are those of before, until all steps are made
    op.execute(f"INSERT INTO updates ({columns}, buffer, staleness) SELECT {columns}, round, 0 FROM updates_before")
    op.drop_table("updates_before")
    op.create_index("one_of_each_client", "updates", ["buffer", "client_id"], unique=True)
    op.create_table(
        "commands",
        Column("job_id", _WHOLE, ForeignKey("jobs.job_id"), primary_key=True, autoincrement=False),
        Column("client_id", _TEXT, primary_key=True),
        *_columns(_WHOLE, "round", "job_round", "published", "base_version"),
        *_columns(_REAL, "until"),
        *_columns(Text(), "overrides"),
        *_columns(LargeBinary(), "command", "row_digest"),
        sqlite_strict=True,
    )


def _columns(kind: TypeEngine[Any], *names: str) -> list[Column[Any]]:
    return [Column(name, kind, nullable=False) for name in names]
