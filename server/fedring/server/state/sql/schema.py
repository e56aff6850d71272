"""All tables of the database, with those of some kinds of rounds."""

from sqlalchemy import Table

from fedring.server.state.secure_rows import SecureMessageRow, SecureRoundRow
from fedring.server.state.sql.tables import METADATA, define

_ROUND = {"round": "rounds.round"}

KEPT = (
    define("secure_messages", SecureMessageRow, "round", "client_id", "kind", refers=_ROUND),
    define("secure_rounds", SecureRoundRow, "round", refers=_ROUND),
)
"""The tables of rows that a kind of round keeps while its round is open."""

TABLE_OF: dict[type, Table] = {table.info["row"]: table for table in METADATA.sorted_tables}
"""The table of each kind of rows."""
