"""All tables of the database, with those of some kinds of rounds.

Such a kind keeps rows until a round ends. Nothing in them is secret from the server.
"""

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Table

from fedring.server.state.sql.tables import METADATA, define

_ROUND = {"round": "rounds.round"}


@dataclass(frozen=True, slots=True)
class SecureMessageRow:
    """A client's message for a round's secure aggregation.

    There is one of each kind.
    """

    round: int
    client_id: str
    kind: str  # "keys", "shares", "signature" or "unmask"
    body: bytes


@dataclass(frozen=True, slots=True)
class SecureRoundRow:
    """The decisions of a round's secure aggregation."""

    round: int
    epoch: int  # in which the round has begun
    groups: list[dict[str, Any]]  # empty until the keys have come


KEPT = (
    define("secure_messages", SecureMessageRow, "round", "client_id", "kind", refers=_ROUND),
    define("secure_rounds", SecureRoundRow, "round", refers=_ROUND),
)
"""The tables of rows that a kind of round keeps while its round is open."""

TABLE_OF: dict[type, Table] = {table.info["row"]: table for table in METADATA.sorted_tables}
"""The table of each kind of rows."""
