"""Failovers of the database itself, which may lose commits.

PostgreSQL begins a new timeline whenever a replica is promoted, or an older copy is restored. A replica has all commits
that were confirmed only if it is a synchronous standby. So the timeline is kept, and whether there was such a standby.
A database that was recovered to an earlier time has lost commits all the same: its settings say up to where.
"""

import logging

from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError

from fedring.server.state.failures import StorageFailed
from fedring.server.state.sql.database import translate

log = logging.getLogger(__name__)

TABLE = (
    "CREATE TABLE IF NOT EXISTS database_timeline (only_row int PRIMARY KEY CHECK (only_row = 1), "
    "timeline bigint NOT NULL, synchronous boolean NOT NULL)"
)
_SYNCHRONOUS = (
    "(current_setting('synchronous_standby_names') <> '' AND current_setting('synchronous_commit') NOT IN "
    "('off', 'local'))"
)
NOTE_SYNCHRONOUS = f"UPDATE database_timeline SET synchronous = {_SYNCHRONOUS} WHERE synchronous <> {_SYNCHRONOUS}"
"""The statement that keeps it up to date."""

# The name of the file that is being written says it at once; what a checkpoint has noted may be that of before.
_TIMELINE = "('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::bigint"
_TARGETS = " OR ".join(
    f"coalesce(current_setting('recovery_target{what}', true), '') <> ''"
    for what in ("", "_name", "_time", "_xid", "_lsn")
)

WITHOUT_STANDBY = (
    "PostgreSQL has no synchronous standby (synchronous_standby_names): if it fails over to a replica, updates that "
    "were accepted just before may be lost"
)


def is_synchronous(engine: Engine) -> bool:
    """Return whether a commit waits until a standby has it.

    Raises:
        StorageFailed: The database does not say so now.
        Deposed: The session has ended.
    """
    try:
        with engine.begin() as connection:
            return bool(connection.execute(text(f"SELECT {_SYNCHRONOUS}")).scalar_one())
    except DBAPIError as error:
        _raise_if_passing(error)
        return False


def may_have_lost_commits(engine: Engine) -> bool:
    """Return whether a failover of the database may have lost commits.

    Raises:
        StorageFailed: The database does not say so now.
        Deposed: The session has ended.
    """
    query = f"SELECT timeline, {_TIMELINE} AS now, synchronous AND NOT ({_TARGETS}) AS complete FROM database_timeline"
    try:
        with engine.begin() as connection:
            found = connection.execute(text(query)).first()
    except DBAPIError as error:
        _raise_if_passing(error)
        log.warning("the database does not tell its timeline, so a failover of it is not noticed: %s", error.orig)
        return False
    if found is None or found.timeline == found.now:
        return False
    log.info("the database has failed over: its timeline was %d, and is %d", found.timeline, found.now)
    return not found.complete


def note_timeline(engine: Engine) -> None:
    """Note the timeline that this leader writes in.

    Raises:
        StorageFailed: It cannot be noted now.
        Deposed: The session has ended.
    """
    values = f"1, {_TIMELINE}, {_SYNCHRONOUS}"
    again = "timeline = excluded.timeline, synchronous = excluded.synchronous"
    insert = f"INSERT INTO database_timeline VALUES ({values}) ON CONFLICT (only_row) DO UPDATE SET {again}"
    try:
        with engine.begin() as connection:
            connection.execute(text(insert))
    except DBAPIError as error:
        _raise_if_passing(error)  # otherwise it was said above


def _raise_if_passing(error: DBAPIError) -> None:
    """Raise an error that another attempt may not have.

    A database that only speaks as PostgreSQL does has others.

    Raises:
        StorageFailed: It stands for such an error.
    """
    if isinstance(meaning := translate(error), StorageFailed):
        raise meaning from error
