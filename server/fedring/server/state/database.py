"""The connection to the server's database, which is opened, checked, and created or migrated."""

import re
import sqlite3
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from json import JSONDecodeError
from pathlib import Path
from secrets import token_hex
from typing import Any

from sqlalchemy import (
    Column,
    Connection,
    Engine,
    MetaData,
    StaticPool,
    Table,
    create_engine,
    event,
    func,
    insert,
    inspect,
    select,
    update,
)
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError

from fedring.server.state.failures import FsyncFailed, StorageError, StorageFailed
from fedring.server.state.tables import (
    METADATA,
    charges,
    clients,
    evaluations,
    jobs,
    meta,
    models,
    rounds,
    secure_messages,
    secure_rounds,
    tokens,
    updates,
)
from fedring.train.metrics import with_origin

Migration = Callable[[Connection], None]

_RESULTS = tuple(Column(name, models.c.created_at.type) for name in ("accuracy", "loss"))
_RATED = Table("models", MetaData(), Column("version"), Column("round"), *_RESULTS)
"""The results that models had in the schema versions 6 and 7."""


def _add_tokens(connection: Connection) -> None:
    tokens.create(connection, checkfirst=True)


def _add_clients(connection: Connection) -> None:
    clients.create(connection, checkfirst=True)


def _add_seconds_left(connection: Connection) -> None:
    _add_column(connection, rounds.c.seconds_left)


def _add_names(connection: Connection) -> None:
    """Name updates and the bases of models, as protocol 2 does; older updates are named by their payloads' digests."""
    for column in (updates.c.epoch, clients.c.last_epoch, clients.c.last_round):
        _add_column(connection, column, "NOT NULL DEFAULT 0")
    for column in (updates.c.name, clients.c.last_name, models.c.base_digest):
        _add_column(connection, column, "NOT NULL DEFAULT ''")
    connection.execute(update(updates).where(updates.c.name == "").values(name=updates.c.digest))
    base = models.alias()
    digest = select(base.c.digest).where(base.c.version == models.c.base_version).scalar_subquery()
    connection.execute(update(models).where(models.c.base_digest == "").values(base_digest=func.coalesce(digest, "")))


def _add_starts(connection: Connection) -> None:
    """Add what a job starts from, and which job has published a model with which result."""
    for column in (jobs.c.start_version, jobs.c.residual_after, models.c.job_id):
        _add_column(connection, column, "NOT NULL DEFAULT 0")
    for result in _RESULTS:
        _add_column(connection, result)
    publisher = select(rounds.c.job_id).where(rounds.c.round == models.c.round).scalar_subquery()
    connection.execute(update(models).values(job_id=func.coalesce(publisher, 0)))
    mine = (evaluations.c.version == _RATED.c.version) & (evaluations.c.client_id != "")
    total = select(func.nullif(func.sum(evaluations.c.total), 0)).where(mine).scalar_subquery()
    correct = select(func.sum(evaluations.c.correct)).where(mine).scalar_subquery()
    loss = select(func.sum(evaluations.c.loss_sum)).where(mine).scalar_subquery()
    connection.execute(update(_RATED).values(accuracy=1.0 * correct / total, loss=loss / total))


def _add_metrics(connection: Connection) -> None:
    """Give evaluations named figures; in older ones, accuracy is defined for all samples."""
    _add_column(connection, evaluations.c.classified, "NOT NULL DEFAULT -1")
    _add_column(connection, evaluations.c.metrics, "NOT NULL DEFAULT '{}'")
    old = evaluations.c.classified < 0
    connection.execute(update(evaluations).where(old).values(classified=evaluations.c.total))


def _add_model_metrics(connection: Connection) -> None:
    """Give models the named figures of their rounds, in place of an accuracy and a loss."""
    _add_column(connection, models.c.metrics, "NOT NULL DEFAULT '{}'")
    by_clients = set(connection.execute(select(evaluations.c.version).where(evaluations.c.client_id != "")).scalars())
    rated = select(_RATED.c.version, _RATED.c.accuracy, _RATED.c.loss, rounds.c.stats)
    for version, accuracy, loss, stats in connection.execute(
        rated.outerjoin_from(_RATED, rounds, rounds.c.round == _RATED.c.round)
    ).all():
        origin = "eval" if version in by_clients else "server"
        figures = with_origin(origin, {}, accuracy=accuracy, loss=loss) | (stats or {}).get("metrics", {})
        connection.execute(update(models).where(models.c.version == version).values(metrics=figures))
    for result in _RESULTS:
        connection.exec_driver_sql(f"ALTER TABLE models DROP COLUMN {result.name}")


def _add_lines(connection: Connection) -> None:
    """Add the epochs in which lines of models began, and the frozen tensors that models were trained with."""
    _add_column(connection, jobs.c.residual_epoch, "NOT NULL DEFAULT 0")
    _add_column(connection, models.c.frozen_digest, "NOT NULL DEFAULT ''")


def _add_charges(connection: Connection) -> None:
    charges.create(connection, checkfirst=True)


def _add_settings(connection: Connection) -> None:
    """Let rounds have settings of their own, of which older rounds have none, and the run a secret."""
    _add_column(connection, rounds.c.settings, "NOT NULL DEFAULT '{}'")
    if not connection.execute(select(meta.c.value).where(meta.c.name == SECRET)).all():
        connection.execute(insert(meta), {"name": SECRET, "value": token_hex(16)})


def _add_controls(connection: Connection) -> None:
    """Give models a control variate, and updates the name of the update whose control variate they have used."""
    for column in (
        models.c.control_blob, models.c.control_digest, models.c.control_line, updates.c.control_previous,
    ):  # fmt: skip
        _add_column(connection, column, "NOT NULL DEFAULT ''")


def _add_secure_aggregation(connection: Connection) -> None:
    """Give models the spread of their blocks, rounds the messages of secure aggregation, and charges a text."""
    for column in (models.c.spread_blob, charges.c.charge):
        _add_column(connection, column, "NOT NULL DEFAULT ''")
    for table in (secure_messages, secure_rounds):
        table.create(connection, checkfirst=True)


def _add_column(connection: Connection, column: Column[Any], constraint: str = "") -> None:
    """Add the column to its table, unless the table was created with it."""
    if column.name not in {found["name"] for found in inspect(connection).get_columns(column.table.name)}:
        kind = column.type.compile(connection.dialect)
        connection.exec_driver_sql(f"ALTER TABLE {column.table.name} ADD COLUMN {column.name} {kind} {constraint}")


MIGRATIONS: tuple[Migration, ...] = (
    _add_tokens,
    _add_clients,
    _add_seconds_left,
    _add_names,
    _add_starts,
    _add_metrics,
    _add_model_metrics,
    _add_lines,
    _add_charges,
    _add_settings,
    _add_controls,
    _add_secure_aggregation,
)
"""Number i migrates a database from schema version i + 1 to i + 2."""

EPOCH = "epoch"
"""The name of the epoch in the table `meta`."""

SECRET = "secret"
"""The name of the run's secret there."""

_VERSION = "schema_version"
_EPOCH = re.compile("[0-9]{1,18}")  # it fits into a column of the database and into a message, and can still grow
_BUSY_MILLISECONDS = 10_000
LOG_BYTES = 4 << 20
"""How long the log beside a database may become before SQLite empties it, unless somebody reads it."""

_PAGE_BYTES = 1 << 14  # with pages of 4 KiB, a small update of 40 KB would take two writes for each page
_FSYNC_ERRORS = ("SQLITE_IOERR_FSYNC", "SQLITE_IOERR_DIR_FSYNC")


UNREADABLE = (DBAPIError, JSONDecodeError, UnicodeDecodeError)
"""What an engine raises; the last two for values that are not what was written."""


class StoreError(StorageError):
    """The database cannot be used, or does not allow a change.

    Its reasons are "newer_state", "corrupt", "lost_commits", "no_backup" and "database".
    """


def open_database(url: str, migrations: Sequence[Migration] = MIGRATIONS, *, log_bytes: int = LOG_BYTES) -> Engine:
    """Open a database. It is created if it is empty, and migrated after a backup if it has an older schema.

    Args:
        url: where it is, as SQLAlchemy writes it.
        migrations: the steps from schema version 1 to the newest.
        log_bytes: how long SQLite's log may become.

    Raises:
        StoreError: "newer_state" if a newer version has written it, "corrupt" if it is damaged, "no_backup" if it
            cannot be copied before it is migrated.
        StorageFailed: if the disk is full or failed.
    """
    engine = _engine(url, log_bytes)
    try:
        with engine.begin() as connection:
            found = _read_version(connection)
            if found == 0:
                METADATA.create_all(connection)
                drawn = {"run_id": uuid.uuid4().hex, SECRET: token_hex(16)}
                connection.execute(insert(meta), [{"name": name, "value": value} for name, value in drawn.items()])
                _write_version(connection, 1 + len(migrations))
        if found:
            _check_integrity(engine)
            _migrate(engine, found, migrations)
    except UNREADABLE as error:
        engine.dispose()
        raise translate(error) from error
    except StoreError:
        engine.dispose()
        raise
    return engine


def backup(engine: Engine, path: Path) -> None:
    """Write a complete and compact copy of an SQLite database that may be in use.

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
    """Return an epoch above those in tables `meta`: a time, so that two that follow the same one differ.

    Raises:
        StoreError: "corrupt", if one of those is not a number that could have been written there.
    """
    return max(int(time.time()), *(epoch_in(each) + 1 for each in found))


def shorten_log(engine: Engine) -> None:
    """Move what is in SQLite's log into the database, and empty the log unless somebody reads from it.

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
    if isinstance(error, JSONDecodeError | UnicodeDecodeError):
        return StoreError("corrupt", f"the database is damaged ({error}): restore a backup")
    name = getattr(error, "sqlite_errorname", "")
    if name in _FSYNC_ERRORS:
        return FsyncFailed(str(error))
    if name == "SQLITE_FULL":
        return StorageFailed("disk_full", str(error))
    if name.startswith(("SQLITE_IOERR", "SQLITE_READONLY", "SQLITE_CANTOPEN")):
        return StorageFailed("disk_error", str(error))
    return StoreError("corrupt" if name in ("SQLITE_NOTADB", "SQLITE_CORRUPT") else "database", str(error))


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
        f"page_size = {_PAGE_BYTES}",  # it takes effect in a new database only
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
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _check_integrity(engine: Engine) -> None:
    """Return if SQLite finds its own structures sound. It has no digests of what is in the rows."""
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


def _migrate(engine: Engine, found: int, migrations: Sequence[Migration]) -> None:
    latest = 1 + len(migrations)
    if found > latest:
        raise StoreError("newer_state", f"written by a newer version: schema {found}, this program knows {latest}")
    if found == latest:
        return
    if (file := engine.url.database) and engine.dialect.name == "sqlite":
        target = Path(f"{file}.v{found}.bak")
        with suppress(FileNotFoundError):
            target.unlink()  # left by an attempt that was interrupted
        backup(engine, target)
    with engine.begin() as connection:
        for migration in migrations[found - 1 :]:
            migration(connection)
        _write_version(connection, latest)


def _read_version(connection: Connection) -> int:
    if connection.dialect.name == "sqlite":
        return int(connection.exec_driver_sql("PRAGMA user_version").scalar_one())
    if not inspect(connection).has_table(meta.name):
        return 0
    return int(connection.execute(select(meta.c.value).where(meta.c.name == _VERSION)).scalar_one())


def _write_version(connection: Connection, version: int) -> None:
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql(f"PRAGMA user_version = {version}")
        return
    row: dict[str, Any] = {"name": _VERSION, "value": str(version)}
    if not connection.execute(update(meta).where(meta.c.name == _VERSION), row).rowcount:
        connection.execute(insert(meta), row)
