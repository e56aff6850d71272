"""Checks of a database's version and log before it is opened."""

import fcntl
import os
import shutil
import sqlite3
import time
from contextlib import closing
from pathlib import Path

from fedring.server.state.blobs import storage_error
from fedring.server.state.failures import StoreError
from fedring.server.state.files import FACTS, UNNAMED
from fedring.server.state.sql.database import RELEASED, SCHEMA, check_released, check_schema, meaning_of
from fedring.server.state.wal import scan

ACCEPT_OLDER = "fl-server --accept-older"
_STATE = """
    SELECT coalesce(max(round), 0), coalesce((SELECT max(version) FROM models), 0),
    (SELECT count(*) FROM updates WHERE round = (SELECT max(round) FROM rounds)) FROM rounds
"""


def check_log(facts: Path) -> None:
    """Check that SQLite reads all commits in a log.

    Nobody uses the database.

    Raises:
        StoreError: "lost_commits", if it would forget some. Nothing was changed.
        StorageFailed: if the disk fails.
    """
    if damage := _damage_of(log_of(facts)):
        what = f"{log_of(facts).name} is damaged at {damage}, so all commits from there on are lost"
        raise older(facts.parent, what)


def check_log_at_rest(folder: Path) -> None:
    """Check the log in a state folder as `check_log` does.

    A log in use is not checked: its server has checked it.
    """
    try:
        check_log(folder / FACTS)
    except StoreError:
        if _is_used(folder):  # it writes the log while this reads it
            return
        check_log(folder / FACTS)  # it may have ended only now


def check_at_rest(folder: Path) -> None:
    """Check that this program can read a state folder's database.

    Its log must be sound, or a server uses it.

    Raises:
        StorageError: if not. Nothing was changed.
    """
    check_log_at_rest(folder)
    version, _ = peek(folder / FACTS)
    if version:
        check_schema(version)


def migrated_at_start(folder: Path) -> str:
    """Return the older version that wrote a state folder.

    The next start migrates it. The text is empty if this version, or nobody, has written it.

    Raises:
        StorageError: if this program cannot read it.
    """
    version, _ = peek(folder / FACTS)
    return RELEASED[version] if 0 < version < SCHEMA else ""


def peek(facts: Path) -> tuple[int, str]:
    """Return the database's schema version and its state id.

    The version is 0 if there is no database, and the id is empty if it has none.
    """
    if not facts.exists():
        return 0, ""
    # Without a log, nobody writes to the database. SQLite would make an empty log even to read it.
    mode = "ro" if log_of(facts).exists() else "ro&immutable=1"
    if facts.with_name(f"{facts.name}-journal").exists():
        mode = "rw"  # power failed while the database was being made: SQLite undoes that before it reads
    try:
        with closing(sqlite3.connect(f"{facts.absolute().as_uri()}?mode={mode}", uri=True)) as connection:
            version = int(connection.execute("PRAGMA user_version").fetchone()[0])
            if version:
                check_released(version)
            row = connection.execute("SELECT value FROM meta WHERE name = 'state_id'").fetchone() if version else None
    except (sqlite3.Error, UnicodeDecodeError) as error:  # the second is raised for damaged error messages
        raise meaning_of(error) from error
    return version, str(row[0]) if row else ""


def older(folder: Path, what: str) -> StoreError:
    """Return the error of a database that has lost commits.

    `what` says how that was found out.
    """
    newest = _newest(folder / FACTS)
    other = f", or go on without them: {ACCEPT_OLDER} falls back to {newest}" if newest else ""
    text = f"{what}, perhaps with updates that clients were told are accepted: restore a backup (flctl restore){other}"
    return StoreError("lost_commits", f"{text}. Nothing was changed.")


def keep_log(folder: Path) -> None:
    """Copy the damaged log to a folder that keeps it.

    It lies there for some days.
    """
    (folder / UNNAMED).mkdir(mode=0o700, exist_ok=True)
    log = log_of(folder / FACTS)
    shutil.copy(log, folder / UNNAMED / f"{log.name}-{time.time_ns()}")


def log_of(facts: Path) -> Path:
    """Return the path of a database's log, which need not exist."""
    return facts.with_name(f"{facts.name}-wal")


def _is_used(folder: Path) -> bool:
    """Return whether a server has locked a state folder (StateLock)."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)  # at once, because no server can start meanwhile
    return False


def _damage_of(log: Path) -> str:
    """Return the place of the damage in a log, or nothing.

    The text is empty if there is none.
    """
    try:
        with log.open("rb", buffering=0) as file:
            fd = file.fileno()
            # A server that has just started may make the log shorter: what is missing then is no frame.
            return scan(lambda offset, size: os.pread(fd, size, offset).ljust(size, b"\0"), os.fstat(fd).st_size).damage
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise storage_error(error) from error


def _newest(facts: Path) -> str:
    """Return a sentence on the newest facts in a damaged database.

    The database has lost commits. The text is empty if SQLite cannot read it.
    """
    try:
        with closing(sqlite3.connect(f"{facts.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            number, version, updates = connection.execute(_STATE).fetchone()
    except (sqlite3.Error, UnicodeDecodeError):
        return ""
    round_ = f"round {number} with {updates} accepted updates" if number else "no round"
    return f"{round_} and {f'model {version}' if version else 'no model'}"
