"""Making a backup of a state while a server uses it.

A snapshot of the database comes first, then the blobs that it names. The server may remove a blob between the two. It
has removed the blob's row first, so a new snapshot does not name the blob. So if a blob is missing, a new snapshot is
taken, and the blobs that it names and that are not copied yet are copied. A blob that the new snapshot still names, and
that is still missing then, was lost.
"""

import fcntl
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from fedring.daemon.config import ConfigError
from fedring.daemon.durable import create, sync, write_durably
from fedring.daemon.exits import Exit
from fedring.server.state.backup.contents import (
    FORMAT,
    MANIFEST,
    BackupError,
    Contents,
    Manifest,
    NamedBlob,
    Tell,
    advancing,
    check_facts,
    copy_blob,
    digest_of,
    read_contents,
)
from fedring.server.state.backup.exchange import refuse_pending
from fedring.server.state.failures import StorageError
from fedring.server.state.files import BLOBS, FACTS, STATE_ID
from fedring.server.state.log_check import check_at_rest
from fedring.server.state.sql.database import OTHER_VERSION
from fedring.version import SOFTWARE

_ATTEMPTS = 10
_BUSY_SECONDS = 10.0


class StateSource(Protocol):
    """A state, which a server may be using meanwhile."""

    def snapshot(self, copy: Path) -> Contents:
        """Write a consistent copy of the database.

        It is one file, whose contents are returned.
        """
        ...

    def size_of(self, digest: str) -> int:
        """Return the length of a blob in bytes, or 0."""
        ...

    def copy_blob(self, blob: NamedBlob, target: Path, tell: Callable[[int], None]) -> int:
        """Copy a blob durably, check it, and return its length in bytes.

        Raises:
            FileNotFoundError: if there is no such blob.
            BackupError: if it is damaged.
        """
        ...


def back_up(source: Path | StateSource, target: Path, tell: Tell = lambda done, total: None) -> Manifest:
    """Copy a state, which a server may be using, to a folder.

    The folder appears when it is complete and durable. Until then everything lies in a folder beside it,
    `target`.partial.

    Args:
        source: the server's state folder, or another source. Nothing is changed there.
        target: the folder to make. It must not exist, or must be empty.
        tell: called with the number of bytes of blobs that have been copied, and the number of all bytes to copy.

    Returns:
        What is in the backup.

    Raises:
        ConfigError: if there is no state in `source`, or one that this program does not understand.
        BackupError: if `target` cannot be used, the state is damaged, or the disk failed. There is no `target` then.
    """
    _check_target(target)
    if isinstance(source, Path):
        _check_outside(target, source)
        source = FolderSource(source)
        source.check()
    try:
        with _partial_of(target) as partial:
            contents, size = _copy(source, partial, tell)
            check_facts(partial / FACTS)
            write_durably(partial / BLOBS / STATE_ID, f"{contents.state_id}\n".encode())
            manifest = _manifest(contents, partial / FACTS, size)
            write_durably(partial / MANIFEST, manifest.to_json().encode())
            for path in (partial / FACTS, partial / BLOBS, partial):
                sync(path)
            partial.rename(target)
            sync(target.absolute().parent)
    except OSError as error:
        raise BackupError(f"cannot write {target}: {error.strerror or error}") from error
    return manifest


class FolderSource:
    """The state in a folder.

    Args:
        folder: the server's state folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def check(self) -> None:
        """Check that there is a state.

        Raises:
            ConfigError: if there is none, or one that this program does not understand.
            BackupError: if it is damaged.
        """
        refuse_pending(self._folder)
        facts = self._folder / FACTS
        if not facts.is_file() or not facts.stat().st_size:
            raise ConfigError(f"there is no state in {self._folder}: give the server's state_dir")
        try:
            check_at_rest(self._folder)
        except StorageError as error:
            if error.reason in OTHER_VERSION:
                raise ConfigError(error.detail) from error
            raise BackupError(f"{facts} cannot be copied: {error}") from error

    def snapshot(self, copy: Path) -> Contents:
        copy.unlink(missing_ok=True)
        create(copy).close()  # SQLite writes into an empty file, and keeps its mode
        uri = f"{(self._folder / FACTS).absolute().as_uri()}?mode=ro"
        try:
            with closing(sqlite3.connect(uri, uri=True, timeout=_BUSY_SECONDS, isolation_level=None)) as connection:
                connection.execute("VACUUM INTO ?", (str(copy),)).close()
        except sqlite3.Error as error:
            code = Exit.TRY_AGAIN if getattr(error, "sqlite_errorname", "").startswith("SQLITE_BUSY") else Exit.FAILED
            raise BackupError(f"cannot copy {self._folder / FACTS}: {error}", code) from error
        contents = read_contents(copy)
        try:
            beside = (self._folder / BLOBS / STATE_ID).read_text().strip()
        except FileNotFoundError:
            beside = ""
        if not beside and not contents.state_id:
            raise ConfigError(f"the state in {self._folder} has no id yet: start fl-server on it once")
        if beside != contents.state_id:
            raise ConfigError(f"{FACTS} and {BLOBS}/ in {self._folder} belong to different states: restore a backup")
        return contents

    def size_of(self, digest: str) -> int:
        try:
            return (self._folder / BLOBS / digest).stat().st_size
        except FileNotFoundError:
            return 0

    def copy_blob(self, blob: NamedBlob, target: Path, tell: Callable[[int], None]) -> int:
        return copy_blob(self._folder / BLOBS / blob.digest, target, blob, tell)


def _check_target(target: Path) -> None:
    why = ""
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        why = "is not a folder: name another one"
    elif target.is_dir() and (os.path.ismount(target) or any(target.iterdir())):
        why = "is a mount point: name a folder in it" if os.path.ismount(target) else "is not empty: name another one"
    elif not target.absolute().parent.is_dir():
        why = f"cannot be made: there is no folder {target.parent}: make it, or name another one"
    if why:
        raise BackupError(f"{target} {why}", Exit.USAGE)


def _check_outside(target: Path, folder: Path) -> None:
    if target.resolve().is_relative_to(folder.resolve()):
        why = f"lies in the state folder {folder}: name a folder outside of it, best on another disk"
        raise BackupError(f"{target} {why}", Exit.USAGE)


@contextmanager
def _partial_of(target: Path) -> Iterator[Path]:
    """Make a folder beside `target` that only this process uses.

    It is removed afterwards, unless it was renamed.
    """
    partial = target.absolute().with_name(target.absolute().name + ".partial")
    partial.mkdir(mode=0o700, exist_ok=True)
    fd = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked = os.path.samestat(os.fstat(fd), partial.stat())
        except (BlockingIOError, FileNotFoundError):
            locked = False
        if not locked:
            raise BackupError(f"another backup to {target} is being made: wait for it", Exit.TRY_AGAIN)
        try:
            for path in partial.iterdir():  # left by a backup that was killed
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            (partial / BLOBS).mkdir(mode=0o700)
            yield partial
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    finally:
        os.close(fd)


def _copy(source: StateSource, partial: Path, tell: Tell) -> tuple[Contents, int]:
    """Copy the database and all blobs that it names.

    Returns:
        Its contents, and the number of bytes of the blobs.
    """
    copied: dict[str, int] = {}
    missing: set[str] = set()
    for _ in range(_ATTEMPTS):
        contents = source.snapshot(partial / FACTS)
        before, missing = missing, _copy_blobs(source, partial / BLOBS, contents, copied, tell)
        for blob in contents.blobs:
            if blob.digest in missing & before:
                raise blob.damage("is missing")
        if not missing:
            named = {blob.digest for blob in contents.blobs}
            for digest in copied.keys() - named:
                (partial / BLOBS / digest).unlink()
            return contents, sum(copied[digest] for digest in named)
    raise BackupError(
        f"the server removed files before they were copied, {_ATTEMPTS} times: "
        "try again when rounds take longer, or raise keep_models and keep_update_rounds",
        Exit.TRY_AGAIN,
    )


def _copy_blobs(source: StateSource, target: Path, contents: Contents, copied: dict[str, int], tell: Tell) -> set[str]:
    """Copy the blobs that are not copied yet.

    Returns:
        The names of the missing blobs.
    """
    wanted = [blob for blob in contents.blobs if blob.digest not in copied]
    done = sum(copied.values())
    total = done + sum(source.size_of(blob.digest) for blob in wanted)
    missing: set[str] = set()
    step = advancing(tell, total, done)
    for blob in wanted:
        try:
            copied[blob.digest] = source.copy_blob(blob, target / blob.digest, step)
        except FileNotFoundError:
            missing.add(blob.digest)
    return missing


def _manifest(contents: Contents, facts: Path, blob_bytes: int) -> Manifest:
    return Manifest(
        format=FORMAT,
        software=SOFTWARE,
        created_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        schema_version=contents.schema_version,
        run_id=contents.run_id,
        state_id=contents.state_id,
        facts_digest=digest_of(facts),
        models=contents.models,
        newest_model=contents.newest_model,
        rounds=contents.rounds,
        open_round=contents.open_round,
        blobs=len(contents.blobs),
        bytes=blob_bytes + facts.stat().st_size,
    )
