"""A copy of a state, taken while a server uses it: a snapshot of the database, then the blobs that it names.

The server may let go of a blob between the two. Its row went first, so that a new snapshot does not name it: then all
begins again, but for the blobs that are copied. A blob that a new snapshot still names, and that is still missing, was
lost.
"""

import fcntl
import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path

from fedring.daemon.config import ConfigError
from fedring.daemon.exits import Exit
from fedring.server.state import swap
from fedring.server.state.snapshot import (
    FORMAT,
    MANIFEST,
    BackupError,
    Contents,
    Manifest,
    Tell,
    check_facts,
    copy_blob,
    create,
    digest_of,
    read_contents,
    schema_version,
    sync,
)
from fedring.server.state.swap import BLOBS, FACTS, STATE_ID
from fedring.version import SOFTWARE

_ATTEMPTS = 10
_BUSY_SECONDS = 10.0


def back_up(state_dir: Path, target: Path, tell: Tell = lambda done, total: None) -> Manifest:
    """Copy the state in `state_dir`, which a server may be using, to the folder `target`.

    The folder is there when it is whole, and durable. Until then all lies in a folder beside it, `target`.partial.

    Args:
        state_dir: the server's state folder; nothing is changed in it.
        target: must not exist, or be an empty folder.
        tell: is called with the bytes of blobs that are copied, and those to copy.

    Returns:
        What is in the backup.

    Raises:
        ConfigError: if there is no state, or one that this program does not understand.
        BackupError: if `target` cannot be used, the state is damaged, or the disk fails; then there is no `target`.
    """
    _check_state(state_dir)
    _check_target(state_dir, target)
    try:
        with _partial_of(target) as partial:
            contents, size = _copy(state_dir, partial, tell)
            check_facts(partial / FACTS)
            _write(partial / BLOBS / STATE_ID, contents.state_id + "\n")
            manifest = _manifest(contents, partial / FACTS, size)
            _write(partial / MANIFEST, manifest.to_json())
            for path in (partial / FACTS, partial / BLOBS, partial):
                sync(path)
            partial.rename(target)
            sync(target.absolute().parent)
    except OSError as error:
        raise BackupError(f"cannot write {target}: {error.strerror or error}") from error
    return manifest


def _check_state(state_dir: Path) -> None:
    swap.refuse_pending(state_dir)
    facts = state_dir / FACTS
    if not facts.is_file() or not facts.stat().st_size:
        raise ConfigError(f"there is no state in {state_dir}: give the server's state_dir")


def _check_target(state_dir: Path, target: Path) -> None:
    why = ""
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        why = "is no folder: name another one"
    elif target.is_dir() and (os.path.ismount(target) or any(target.iterdir())):
        why = "is a mount point: name a folder in it" if os.path.ismount(target) else "is not empty: name another one"
    elif not target.absolute().parent.is_dir():
        why = f"cannot be made: there is no folder {target.parent}: make it, or name another one"
    elif target.resolve().is_relative_to(state_dir.resolve()):
        why = f"lies in the state folder {state_dir}: name a folder outside, best on another disk"
    if why:
        raise BackupError(f"{target} {why}", Exit.USAGE)


@contextmanager
def _partial_of(target: Path) -> Iterator[Path]:
    """Inside, a new folder beside `target` is this process's alone; afterwards it is gone, or has been renamed."""
    partial = target.absolute().with_name(target.absolute().name + ".partial")
    partial.mkdir(mode=0o700, exist_ok=True)
    fd = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = os.path.samestat(os.fstat(fd), partial.stat())
        except (BlockingIOError, FileNotFoundError):
            mine = False
        if not mine:
            raise BackupError(f"another backup to {target} is being made: wait for it", Exit.TRY_AGAIN)
        try:
            for path in partial.iterdir():  # of a backup that was killed
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            (partial / BLOBS).mkdir(mode=0o700)
            yield partial
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    finally:
        os.close(fd)


def _copy(state_dir: Path, partial: Path, tell: Tell) -> tuple[Contents, int]:
    """Copy the database and all blobs that it names; return its contents, and the bytes of the blobs."""
    copied: dict[str, int] = {}
    missing: set[str] = set()
    for _ in range(_ATTEMPTS):
        contents = _snapshot(state_dir, partial / FACTS)
        for blob in contents.blobs:
            if blob.digest in missing:
                raise blob.damage("is missing")
        missing = _copy_blobs(state_dir / BLOBS, partial / BLOBS, contents, copied, tell)
        if not missing:
            named = {blob.digest for blob in contents.blobs}
            for digest in copied.keys() - named:
                (partial / BLOBS / digest).unlink()
            return contents, sum(copied[digest] for digest in named)
    raise BackupError(
        f"the server let go of files faster than they were copied, {_ATTEMPTS} times: "
        "try again, when rounds take longer, or raise keep_models and keep_update_rounds",
        Exit.TRY_AGAIN,
    )


def _copy_blobs(source: Path, target: Path, contents: Contents, copied: dict[str, int], tell: Tell) -> set[str]:
    """Copy what is not copied yet; return the names of those that are not there."""
    wanted = [blob for blob in contents.blobs if blob.digest not in copied]
    done = sum(copied.values())
    total = done + sum(_size_of(source / blob.digest) for blob in wanted)
    missing: set[str] = set()

    def step(count: int) -> None:
        nonlocal done
        done += count
        tell(done, total)

    for blob in wanted:
        try:
            copied[blob.digest] = copy_blob(source / blob.digest, target / blob.digest, blob, step)
        except FileNotFoundError:
            missing.add(blob.digest)
    return missing


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _snapshot(state_dir: Path, copy: Path) -> Contents:
    """Write one consistent copy of the database, without keeping the server from writing, and read it."""
    copy.unlink(missing_ok=True)
    create(copy).close()  # SQLite takes an empty file, and leaves its mode
    uri = f"{(state_dir / FACTS).absolute().as_uri()}?mode=ro"
    try:
        with closing(sqlite3.connect(uri, uri=True, timeout=_BUSY_SECONDS, isolation_level=None)) as connection:
            schema_version(connection)
            connection.execute("VACUUM INTO ?", (str(copy),)).close()
    except sqlite3.Error as error:
        code = Exit.TRY_AGAIN if getattr(error, "sqlite_errorname", "").startswith("SQLITE_BUSY") else Exit.FAILED
        raise BackupError(f"cannot copy {state_dir / FACTS}: {error}", code) from error
    contents = read_contents(copy)
    try:
        beside = (state_dir / BLOBS / STATE_ID).read_text().strip()
    except FileNotFoundError:
        beside = ""
    if not beside and not contents.state_id:
        raise ConfigError(f"the state in {state_dir} is of an older version: start fl-server on it once")
    if beside != contents.state_id:
        raise ConfigError(f"{FACTS} and {BLOBS}/ in {state_dir} are of different states: restore a backup")
    return contents


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


def _write(path: Path, text: str) -> None:
    with create(path) as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())
