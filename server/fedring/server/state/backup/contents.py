"""The contents of a backup, and their checks.

backup.json         this module's Manifest; written last
facts.sqlite        the database, as one file without a log beside it
blobs/<digest>      every file that the database names
blobs/state_id      the id of the state that both belong to
"""

import hashlib
import json
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, NullPool, create_engine

from fedring.codec.digest import Digest, is_name
from fedring.daemon.config import ConfigError
from fedring.daemon.durable import create, make_durable, sync
from fedring.daemon.exits import Exit
from fedring.server.state.failures import FsyncFailed, StorageError, StorageFailed, StoreError
from fedring.server.state.files import BLOBS, FACTS
from fedring.server.state.sql.copying import check_rows
from fedring.server.state.sql.database import (
    OTHER_VERSION,
    SCHEMA,
    UNREADABLE,
    check_released,
    check_schema,
    meaning_of,
    open_database,
    shorten_log,
)
from fedring.untrusted import parse_json

FORMAT = 1
MANIFEST = "backup.json"
Tell = Callable[[int, int], None]
"""Called with the number of bytes that have been copied, and the number of all bytes to copy."""

_STEP = 1 << 20  # bytes that are copied at a time

_NAMED_BLOBS = """
    SELECT blob, 'the update of ' || client_id || ' in round ' || round, total_bytes FROM updates WHERE blob != ''
    UNION ALL SELECT blob, 'model ' || version, bytes FROM models WHERE blob != ''
    UNION ALL SELECT delta_blob, 'the delta to model ' || version, NULL FROM models WHERE delta_blob != ''
    UNION ALL SELECT residual_blob, 'the residual of model ' || version, NULL FROM models WHERE residual_blob != ''
    UNION ALL
    SELECT optimizer_blob, 'the optimizer state of model ' || version, NULL FROM models WHERE optimizer_blob != ''
    UNION ALL
    SELECT control_blob, 'the control variate of model ' || version, NULL FROM models WHERE control_blob != ''
    UNION ALL SELECT spread_blob, 'the spread of model ' || version, NULL FROM models WHERE spread_blob != ''
    UNION ALL
    SELECT transforms_blob, 'the transforms of model ' || version, NULL FROM models WHERE transforms_blob != ''
"""
_DISK_FAILED = (StorageFailed, FsyncFailed)
_OPEN_ROUND = """
    SELECT coalesce(max(round), 0) FROM rounds JOIN jobs USING (job_id)
    WHERE ended_at IS NULL AND jobs.state = 'running'
"""


class BackupError(Exception):
    """A backup or a restore is not possible.

    The message is a sentence for people that says why.

    Attributes:
        exit_code: of flctl.
    """

    def __init__(self, sentence: str, exit_code: Exit = Exit.FAILED) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class NamedBlob:
    """A blob that the database names."""

    digest: str
    owner: str  # what it belongs to, for people: "model 3"
    size: int | None  # in bytes, if the database knows it

    def damage(self, what: str) -> BackupError:
        """Return the error of this blob.

        `what`, a clause, follows its name.
        """
        return BackupError(f"{BLOBS}/{self.digest}, of {self.owner}, {what}")


@dataclass(frozen=True, slots=True)
class Contents:
    """A database's facts about the state that it belongs to."""

    schema_version: int
    run_id: str
    state_id: str
    models: int  # the number of models that are kept
    newest_model: int  # its version; 0 if there is none
    rounds: int  # the number of rounds that are kept
    open_round: int  # its number; 0 if there is none
    blobs: tuple[NamedBlob, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """A backup's description of itself, as in backup.json.

    The names of the fields are those in the file.
    """

    format: int
    software: str
    created_at: str
    schema_version: int
    run_id: str
    state_id: str
    facts_digest: str  # the SHA-256 of the database, in hex
    models: int
    newest_model: int
    rounds: int
    open_round: int
    blobs: int  # the number of blobs
    bytes: int  # of the database and all blobs

    def to_json(self) -> str:
        """Return the text of the file."""
        return json.dumps(asdict(self), indent=2) + "\n"


def parse_manifest(text: str, where: Path) -> Manifest:
    """Parse the text of backup.json.

    Args:
        text: what the file holds.
        where: the file, for errors.

    Raises:
        ConfigError: if it is not a manifest, or is one of a newer version.
    """
    try:
        found: dict[str, Any] = parse_json(text)
        if found["format"] > FORMAT:
            raise ConfigError(f"{where} has format {found['format']}, this program knows {FORMAT}: use a newer flctl")
        manifest = Manifest(**{field.name: found[field.name] for field in fields(Manifest)})
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{where} is not what flctl backup writes ({error!r}): use another backup") from error
    wrong = [field.name for field in fields(Manifest) if type(found[field.name]) is not field.type]
    if wrong:
        raise ConfigError(f"{where} is not what flctl backup writes ({', '.join(wrong)}): use another backup")
    return manifest


def open_copy(facts: Path) -> sqlite3.Connection:
    """Open a database that nobody else uses, read-only.

    A log beside it is ignored.
    """
    return sqlite3.connect(f"{facts.absolute().as_uri()}?mode=ro&immutable=1", uri=True)


def read_contents(facts: Path) -> Contents:
    """Read the facts in a copied database about its state.

    Raises:
        ConfigError: if another version has written it.
        BackupError: if it is damaged.
    """
    try:
        with closing(open_copy(facts)) as connection:
            version = schema_version(connection)
            meta: dict[str, str] = dict(connection.execute("SELECT name, value FROM meta"))
            models, newest = connection.execute("SELECT count(*), coalesce(max(version), 0) FROM models").fetchone()
            ((rounds,),) = connection.execute("SELECT count(*) FROM rounds")
            ((open_round,),) = connection.execute(_OPEN_ROUND)
            blobs = tuple(_named(connection))
    except sqlite3.Error as error:
        raise BackupError(f"{facts} is damaged ({error})") from error
    ids = meta.get("run_id", ""), meta.get("state_id", "")
    return Contents(version, *ids, models, newest, rounds, open_round, blobs)


def schema_version(connection: sqlite3.Connection) -> int:
    """Return the version of the database's schema.

    Raises:
        ConfigError: if another version has written it.
    """
    ((found,),) = connection.execute("PRAGMA user_version")
    try:
        check_schema(found)
    except StoreError as error:
        raise ConfigError(error.detail) from error
    return int(found)


def migrate_copy(facts: Path) -> None:
    """Make a copied database of an older version one of this version.

    Raises:
        ConfigError: if a version has written it that this program does not read.
        BackupError: if it is damaged, or the disk failed.
    """
    try:
        with closing(open_copy(facts)) as connection:
            ((found,),) = connection.execute("PRAGMA user_version")
        if found == SCHEMA:
            return
        check_released(found)
        engine = open_database(f"sqlite:///{facts.absolute()}", migrates=True)
        try:
            shorten_log(engine)  # nobody reads the log of a copy
        finally:
            engine.dispose()
    except sqlite3.Error as error:
        if isinstance(meaning := meaning_of(error), _DISK_FAILED):
            raise BackupError(f"{facts} cannot be migrated: {meaning}") from error
        raise BackupError(f"{facts.name} is damaged ({error})") from error
    except _DISK_FAILED as error:  # that of the copy, and not of the backup
        raise BackupError(f"{facts} cannot be migrated: {error}") from error
    except StorageError as error:
        if error.reason in OTHER_VERSION:
            raise ConfigError(error.detail) from error
        raise BackupError(f"{facts.name} is damaged: {error.detail}") from error
    sync(facts)


def check_facts(facts: Path) -> None:
    """Check that a copied database is sound.

    Each of its rows must hold what was written to it.

    Raises:
        BackupError: if not.
    """
    try:
        with closing(open_copy(facts)) as connection:
            ((found,),) = connection.execute("PRAGMA integrity_check(1)")
            if found != "ok":
                raise BackupError(f"{facts.name} is damaged ({found})")
        with read_rows(facts) as reader:
            check_rows(reader)
    except StoreError as error:
        raise BackupError(f"{facts.name} is damaged: {error.detail}") from error
    except (sqlite3.Error, *UNREADABLE) as error:
        raise BackupError(f"{facts.name} is damaged ({error})") from error


@contextmanager
def read_rows(facts: Path) -> Iterator[Connection]:
    """Open a database that nobody else uses, read-only, for SQLAlchemy."""
    engine = create_engine("sqlite://", creator=lambda: open_copy(facts), poolclass=NullPool)
    with engine.connect() as reader:
        yield reader


def copy_blob(source: Path, target: Path, blob: NamedBlob, tell: Callable[[int], None]) -> int:
    """Copy a blob durably, check it, and return its length in bytes.

    Args:
        source: the blob's file.
        target: the copy, which is removed after an error.
        blob: what the database says about the blob.
        tell: called with the number of bytes of each step.

    Raises:
        FileNotFoundError: if there is no such file.
        BackupError: if the file does not have the digest that it is named by, or cannot be read.
    """
    with source.open("rb", buffering=0) as file:
        return write_blob(checked(parts_of(file.fileno(), blob), blob, tell), target)


def write_blob(parts: Iterable[bytes], target: Path) -> int:
    """Write a blob durably, and return its length in bytes.

    The file is removed after an error.
    """
    copied = 0
    with create(target) as copy:
        try:
            for data in parts:
                copy.write(data)
                copied += len(data)
            make_durable(copy)
        except BaseException:
            target.unlink(missing_ok=True)
            raise
    return copied


def checked(parts: Iterable[bytes], blob: NamedBlob, tell: Callable[[int], None]) -> Iterator[bytes]:
    """Yield the parts of a blob, and check it at their end.

    Args:
        parts: its bytes, in their order.
        blob: what the database says about the blob.
        tell: called with the number of bytes of each part.

    Raises:
        BackupError: if they do not have the digest that the blob is named by.
    """
    digest, size = Digest(like=blob.digest), 0
    for data in parts:
        digest.update(data)
        size += len(data)
        yield data
        tell(len(data))
    if digest.name != blob.digest:
        short = blob.size is not None and size < blob.size
        raise blob.damage("has been cut short" if short else "does not hold what was written to it")


def parts_of(fd: int, blob: NamedBlob, step: int = _STEP) -> Iterator[bytes]:
    """Yield the bytes of a blob's open file.

    There are at most `step` at a time.

    Raises:
        BackupError: if it cannot be read.
    """
    try:
        while data := os.read(fd, step):
            yield data
    except OSError as error:
        raise blob.damage(f"cannot be read ({error.strerror})") from error


def advancing(tell: Tell, total: int, done: int = 0) -> Callable[[int], None]:
    """Return a function that counts bytes, and tells."""

    def step(count: int) -> None:
        nonlocal done
        done += count
        tell(done, total)

    return step


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _named(connection: sqlite3.Connection) -> Iterator[NamedBlob]:
    seen: set[str] = set()
    for digest, owner, size in connection.execute(_NAMED_BLOBS):
        if not is_name(digest):
            raise BackupError(f"{FACTS} is damaged: it names {digest!r} as the file of {owner}")
        if digest not in seen:
            seen.add(digest)
            yield NamedBlob(digest, owner, size)
