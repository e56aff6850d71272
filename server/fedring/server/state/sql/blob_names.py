"""The names of blobs in the rows of the database."""

from sqlalchemy import Connection, select, union_all

from fedring.server.state.sql.tables import models, updates

STATES = tuple(
    models.c[name] for name in ("residual_blob", "optimizer_blob", "control_blob", "spread_blob", "transforms_blob")
)
"""The blobs of a model that only the next aggregation reads."""

_COLUMNS = (updates.c.blob, models.c.blob, models.c.delta_blob, *STATES)


def named_blobs(connection: Connection) -> set[str]:
    """Return the names of all blobs that a row names."""
    query = union_all(*(select(column).where(column != "") for column in _COLUMNS))
    return set(connection.execute(query).scalars())
