"""The connection to the server's database, which is opened, checked, and created."""

import logging
import re
import sqlite3
import time
import uuid
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from secrets import token_hex

from sqlalchemy import Connection, Engine, StaticPool, create_engine, event, inspect, select
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError, OperationalError

from fedring.daemon.crash import crashpoint
from fedring.server.state.failures import FsyncFailed, StorageError, StorageFailed, StoreError
from fedring.server.state.files import FACTS
from fedring.server.state.rows import MetaRow
from fedring.server.state.sql import sealed
from fedring.server.state.sql.tables import METADATA, meta

log = logging.getLogger(__name__)

SCHEMA = 19
"""The version of the tables."""

RELEASED = {15: "0.2.0", SCHEMA: "1.0.0"}
"""By the version of the tables, the fedring that first had it. A server migrates these, and no others."""

OTHER_VERSION = ("older_state", "newer_state")
"""The reasons of a StoreError that another version's tables lead to."""

EPOCH = "epoch"
"""The name of the epoch in the table `meta`."""

SECRET = "secret"
"""The name of the run's secret there."""

VERSION = "schema_version"
"""The name of the version of the tables there, in databases that keep none themselves."""

_EPOCH = re.compile("[0-9]{1,18}")  # it fits into a column of the database and into a message, and can still grow
_BUSY_MILLISECONDS = 10_000
_LOCK_SECONDS, _LOCK_AGAIN_SECONDS = 30.0, 0.02
LOG_BYTES = 4 << 20
"""How long the log beside a database may become before SQLite empties it, unless somebody reads it."""

PAGE_BYTES = 1 << 14  # of SQLite: with pages of 4 KiB, a small update of 40 KB would take two writes for each page
_READS = {"only_reads": True}
"""Marks a connection whose transactions only read."""

# What the drivers say: the names of SQLite's errors, and PostgreSQL's SQLSTATEs, or how both begin.
_FSYNC_ERRORS = ("SQLITE_IOERR_FSYNC", "SQLITE_IOERR_DIR_FSYNC")
_FULL = ("SQLITE_FULL", "53100", "53200")  # the disk, or PostgreSQL's memory
_LOCKED = ("SQLITE_BUSY", "SQLITE_LOCKED", "40001", "40P01", "55P03")  # or not in turn, or in a deadlock
# Or not to be written to now; or PostgreSQL lacks something, was told to break off, or its system has failed.
_FAILED = ("SQLITE_IOERR", "SQLITE_READONLY", "SQLITE_CANTOPEN", "25006", "53", "57", "58")
_DAMAGED = ("SQLITE_NOTADB", "SQLITE_CORRUPT", "XX001", "XX002")

UNREADABLE = (DBAPIError, UnicodeDecodeError)
"""What an engine raises; the second for damaged messages of SQLite."""


def open_database(database: str | Engine, *, log_bytes: int = LOG_BYTES, migrates: bool = False) -> Engine:
    """Open a database, and check it.

    It is created if it is empty.

    Args:
        database: where it is, as SQLAlchemy writes it; or its engine, if it is open already.
        log_bytes: how long SQLite's log may become.
        migrates: make the tables of an older version those of this one. Nobody else writes to them.

    Raises:
        StoreError: "older_state" or "newer_state" if another version has written it, "corrupt" if it is damaged.
        StorageFailed: if the disk is full or failed.
    """
    engine = _engine(database, log_bytes) if isinstance(database, str) else database
    try:
        with engine.begin() as connection:
            found = read_version(connection)
            if found == 0:
                make_tables(connection)
                sealed.add(connection, MetaRow("run_id", uuid.uuid4().hex), MetaRow(SECRET, token_hex(16)))
            elif migrates:
                check_released(found)
                _migrate(connection, found)
            else:
                check_schema(found)
        if migrates and 0 < found < SCHEMA:
            crashpoint("migration_committed")
        if found:
            _check_integrity(engine)
            # A reader does not block a server, which may be using the database now.
            with engine.connect().execution_options(**_READS) as connection:
                sealed.check_all(connection)
    except UNREADABLE as error:
        engine.dispose()
        raise translate(error) from error
    except StoreError:
        engine.dispose()
        raise
    return engine


def make_tables(connection: Connection) -> None:
    """Create all tables, empty but for their version."""
    METADATA.create_all(connection)
    _note_version(connection)


def read_version(connection: Connection) -> int:
    """Return the version of the tables; 0 if there are none."""
    if connection.dialect.name == "sqlite":
        return int(connection.exec_driver_sql("PRAGMA user_version").scalar_one())
    if not inspect(connection).has_table(meta.name):
        return 0
    return int(connection.execute(select(meta.c.value).where(meta.c.name == VERSION)).scalar_one())


def check_schema(found: int) -> None:
    """Return if tables are those of this program.

    Args:
        found: their version.

    Raises:
        StoreError: "older_state" or "newer_state", if not.
    """
    check_released(found)
    if found < SCHEMA:
        text = f"the state was written by fedring {RELEASED[found]} (schema {found})"
        raise StoreError("older_state", f"{text}: start this version's fl-server on it once, which migrates it")


def check_released(found: int) -> None:
    """Return if a server can migrate tables.

    Args:
        found: their version, which may be this program's own.

    Raises:
        StoreError: "older_state" or "newer_state", if not.
    """
    if found > SCHEMA:
        text = (
            f"the state was written by a newer version: schema {found}, this program knows {SCHEMA}: use that version"
        )
        raise StoreError("newer_state", text)
    if found not in RELEASED:
        before = "fedring 0.1.0 or before" if found < min(RELEASED) else "a version that was not released"
        text = f"the state was written by {before} (schema {found}), which this program does not read"
        way = f"go on with {'fedring 0.1.0' if found < min(RELEASED) else 'it'}, or give the server an empty folder"
        raise StoreError("older_state", f"{text}: {way}; nothing was changed")


def lock_tables(connection: Connection) -> None:
    """Let nobody else read or write the tables until the transaction ends.

    All are locked at once or none, again and again until nobody reads one: a standby may read them one by one, in any
    order, and whoever holds some while waiting for others would block it, and be blocked by it.

    Raises:
        OperationalError: Somebody uses them for too long.
    """
    if connection.dialect.name == "sqlite":  # whose transactions that write are alone
        return
    names = [table.name for table in METADATA.sorted_tables if inspect(connection).has_table(table.name)]
    end = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            with connection.begin_nested():
                connection.exec_driver_sql(f"LOCK TABLE {', '.join(names)} IN ACCESS EXCLUSIVE MODE NOWAIT")
            return
        except OperationalError:
            if time.monotonic() > end:
                raise
        time.sleep(_LOCK_AGAIN_SECONDS)


def backup(engine: Engine, path: Path) -> None:
    """Write a complete and compact copy of an SQLite database.

    The database may be in use.

    Args:
        engine: the database.
        path: the copy, which must not exist.

    Raises:
        StoreError: "no_backup", if that fails.
    """
    raw = engine.raw_connection()  # VACUUM cannot run in a transaction
    try:
        raw.cursor().execute("VACUUM INTO ?", (str(path),))
    except sqlite3.Error as error:
        raise StoreError("no_backup", str(error)) from error
    finally:
        raw.close()


def epoch_in(found: Mapping[str, str]) -> int:
    """Return the epoch of the rounds; 0 before the first restore.

    Args:
        found: the table `meta`.

    Raises:
        StoreError: "corrupt", if it is not a number that could have been written there.
    """
    text = found.get(EPOCH, "0")
    if not isinstance(text, str) or not _EPOCH.fullmatch(text):
        raise StoreError("corrupt", f"the database is damaged (its epoch is {str(text)[:30]!r}): restore a backup")
    return int(text)


def next_epoch(*found: Mapping[str, str]) -> int:
    """Return an epoch above those in tables `meta`.

    It is a time, so that two that follow the same one differ.

    Raises:
        StoreError: "corrupt", if one of those is not a number that could have been written there.
    """
    return max(int(time.time()), *(epoch_in(each) + 1 for each in found))


def shorten_log(engine: Engine) -> None:
    """Move SQLite's log into the database, and empty it.

    The log is not emptied if somebody reads from it.

    Raises:
        sqlite3.Error: if that fails.
    """
    raw = engine.raw_connection()  # a checkpoint cannot run in a transaction
    try:
        cursor = raw.cursor()
        cursor.execute("PRAGMA busy_timeout = 0")  # readers are not waited for: a backup may read for minutes
        try:
            cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        finally:
            cursor.execute(f"PRAGMA busy_timeout = {_BUSY_MILLISECONDS}")
    finally:
        raw.close()


def translate(error: Exception) -> StorageError | FsyncFailed:
    """Return the error that stands for an exception of SQLAlchemy."""
    return meaning_of(error.orig if isinstance(error, DBAPIError) else error)


def meaning_of(error: BaseException | None) -> StorageError | FsyncFailed:
    """Return the error that stands for an exception of the database's driver."""
    if isinstance(error, FsyncFailed):  # a listener of the engine has found out more
        return error
    if isinstance(error, UnicodeDecodeError):
        return StoreError("corrupt", f"the database is damaged ({error}): restore a backup")
    name = str(getattr(error, "sqlstate", None) or getattr(error, "sqlite_errorname", ""))
    text = str(error).strip().partition("\n")[0]  # PostgreSQL adds the statement
    if name in _FSYNC_ERRORS:
        return FsyncFailed(text)
    if name in _FULL:
        return StorageFailed("disk_full", text)
    if name.startswith(_LOCKED):  # a later attempt may find it free
        used = FACTS if name.startswith("SQLITE") else "the database"
        return StorageFailed("disk_error", f"{text}: another program uses {used}")
    if name.startswith(_FAILED):
        return StorageFailed("disk_error", text)
    # A column whose name has changed in the file is not found.
    if name.startswith(_DAMAGED) or text.startswith("no such "):
        return StoreError("corrupt", f"the database is damaged ({text}): restore a backup (flctl restore)")
    return StoreError("database", text)


def _migrate(connection: Connection, found: int) -> None:
    """Make tables of a released version those of this program."""
    if found == SCHEMA:
        return
    from fedring.server.state.sql.migrations import migrate  # Alembic, which few starts need

    log.info("migrates the state of fedring %s (schema %d to %d)", RELEASED[found], found, SCHEMA)
    lock_tables(connection)
    migrate(connection, found)
    _note_version(connection)
    crashpoint("migration_made")


def _note_version(connection: Connection) -> None:
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql(f"PRAGMA user_version = {SCHEMA}")
    else:
        sealed.set_meta(connection, VERSION, str(SCHEMA))


def _engine(url: str, log_bytes: int) -> Engine:
    if make_url(url).get_backend_name() != "sqlite":
        return create_engine(url)
    engine = create_engine(url, poolclass=StaticPool, connect_args={"check_same_thread": False})
    event.listen(engine, "connect", partial(_configure, log_bytes=log_bytes))
    event.listen(engine, "begin", _begin)
    return engine


def _configure(connection: sqlite3.Connection, _record: object, *, log_bytes: int) -> None:
    connection.isolation_level = None  # `_begin` begins transactions: sqlite3 would leave reads outside of them
    for pragma in (
        f"page_size = {PAGE_BYTES}",  # it takes effect in a new database only
        f"busy_timeout = {_BUSY_MILLISECONDS}",
        "journal_mode = WAL",
        "synchronous = FULL",  # with NORMAL a power loss may undo a commit
        "foreign_keys = ON",
        "secure_delete = OFF",  # Debian's SQLite would overwrite removed updates with zeros
    ):
        connection.execute(f"PRAGMA {pragma}").close()
    ((page_bytes,),) = connection.execute("PRAGMA page_size")
    for pragma in (
        f"wal_autocheckpoint = {max(1, log_bytes // page_bytes)}",  # after a commit, without waiting for readers
        f"journal_size_limit = {log_bytes}",  # after a reader has kept the log from being emptied
    ):
        connection.execute(f"PRAGMA {pragma}").close()


def _begin(connection: Connection) -> None:
    reads = _READS.items() <= connection.get_execution_options().items()
    connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")


def _check_integrity(engine: Engine) -> None:
    """Return if SQLite finds its own structures sound. Values have digests (`fedring.server.state.sql.sealed`)."""
    if engine.dialect.name == "sqlite":
        raw = engine.raw_connection()  # without a transaction, which would block others for as long as this takes
        try:
            ((found,),) = raw.cursor().execute("PRAGMA integrity_check(1)")
        except sqlite3.Error as error:
            raise meaning_of(error) from error
        finally:
            raw.close()
        if found != "ok":
            raise StoreError("corrupt", f"the database is damaged ({found}): restore a backup")
