"""Making a backup the state of a server again.

First the backup is copied into the state folder, beside what is there, and every byte of the copy is checked. Only then
are the two exchanged (`fedring.server.state.backup.exchange`).
"""

import shutil
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fedring.daemon.config import ConfigError
from fedring.daemon.durable import create, make_durable, sync
from fedring.daemon.lock import StateInUse, StateLock
from fedring.server.state.backup import exchange
from fedring.server.state.backup.contents import (
    MANIFEST,
    BackupError,
    Contents,
    Manifest,
    Tell,
    advancing,
    check_facts,
    copy_blob,
    digest_of,
    migrate_copy,
    open_copy,
    parse_manifest,
    read_contents,
)
from fedring.server.state.backup.departure import departure_of
from fedring.server.state.failures import StoreError
from fedring.server.state.files import BLOBS, FACTS, STATE_ID
from fedring.server.state.log_check import log_of
from fedring.server.state.rows import MetaRow
from fedring.server.state.sql.database import EPOCH, next_epoch
from fedring.server.state.sql.sealed import values_of

_ORIGIN = "restored_from"  # in the table `meta`: the manifest's digest of the database that was restored


@dataclass(frozen=True, slots=True)
class Restored:
    """The result of a restore."""

    manifest: Manifest  # what is in the state now
    replaced: Path | None = None  # the folder of the old state; None if there was none
    replaced_schema: str = ""  # instead of it: what the old rows are in, in the database of a shared state
    finished: bool = False  # True if only the rest of an interrupted restore was done
    left: str = ""  # why objects of the old state are not put aside yet, which the next server to lead does


def restore(backup: Path, state_dir: Path, *, replace: bool = False, tell: Tell = lambda done, total: None) -> Restored:
    """Make a backup the state of a server.

    Its rounds are counted in a new epoch.

    Args:
        backup: a folder that `back_up` has made. It is only read.
        state_dir: the state folder of a server that does not run. It is made if it does not exist.
        replace: if there is a state already, move it to a folder `replaced-TIME` in `state_dir`.
        tell: called with the number of bytes of blobs that have been copied, and the number of all bytes to copy.

    Raises:
        ConfigError: if `state_dir` is in use or holds a state, or if `backup` is not a backup that this program
            understands.
        BackupError: if the backup is damaged, or the disk failed. The old state is complete and in its place. But if
            the disk failed during the exchange, the server does not start until the restore is repeated.
    """
    manifest = read_manifest(backup)
    try:
        with StateLock(state_dir):
            return _restore(backup, manifest, state_dir, replace=replace, tell=tell)
    except StateInUse as error:
        holder = f"process {error.pid}" if error.pid else "another process"
        raise ConfigError(f"state_dir {state_dir} is in use by {holder}: stop fl-server first") from error
    except OSError as error:
        way = ": repeat the restore when the disk works again" if exchange.is_pending(state_dir) else ""
        raise BackupError(f"cannot restore into {state_dir}: {error.strerror or error}{way}") from error


def read_manifest(backup: Path) -> Manifest:
    """Read a backup's description of itself.

    Raises:
        ConfigError: if the folder is not a backup.
    """
    path = backup / MANIFEST
    try:
        text = path.read_text()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(
            f"{backup} is not a complete backup, it has no {MANIFEST}: name a folder that flctl backup has made"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    return parse_manifest(text, path)


def stage_facts(backup: Path, manifest: Manifest, draft: Path) -> Contents:
    """Copy a backup's database, and check the copy.

    It is migrated if an older version has written it. Blobs are left out.

    Args:
        backup: the backup, which is only read.
        manifest: what must be there.
        draft: the folder to copy to, which has a folder for the blobs.

    Raises:
        ConfigError: if a version has written it that this program does not read.
        BackupError: if it is damaged.
    """
    facts, beside = draft / FACTS, draft / BLOBS / STATE_ID
    for path in (facts, beside):
        _copy(backup / path.relative_to(draft), path)
    if digest_of(facts) != manifest.facts_digest:
        raise BackupError(f"{backup / FACTS} does not hold what was written to it: use another backup")
    migrate_copy(facts)
    contents = read_contents(facts)
    check_facts(facts)
    if len({manifest.state_id, contents.state_id, beside.read_text(errors="replace").strip()}) > 1:
        raise BackupError(f"{FACTS} and {BLOBS}/ in {backup} belong to different states: use another backup")
    return contents


def epoch_rows(manifest: Manifest, *found: Mapping[str, str]) -> tuple[MetaRow, MetaRow]:
    """Return the rows of the table `meta` that a restore changes.

    The epoch is a time, so that two restores of a backup differ.

    Args:
        manifest: of the backup.
        found: the tables `meta` of the backup and of the state that it replaces.

    Raises:
        BackupError: if the epoch in the backup is damaged.
    """
    backup, *replaced = found
    try:
        epoch = next_epoch(backup)
    except StoreError as error:
        raise BackupError(f"{FACTS} in the backup is damaged, its epoch is not a number: use another backup") from error
    for each in replaced:
        with suppress(StoreError):  # a damaged state may be replaced
            epoch = max(epoch, next_epoch(each))
    return MetaRow(EPOCH, str(epoch)), MetaRow(_ORIGIN, manifest.facts_digest)


def _restore(backup: Path, manifest: Manifest, state_dir: Path, *, replace: bool, tell: Tell) -> Restored:
    if exchange.is_pending(state_dir):
        replaced = exchange.finish(state_dir)
        if meta_of(state_dir / FACTS).get(_ORIGIN) == manifest.facts_digest:
            return Restored(manifest, replaced, finished=True)
    departure = departure_of(state_dir)
    if departure is not None and not departure.done:
        raise ConfigError(f"the state in {state_dir} is being moved to {departure.state_url}: repeat flctl migrate")
    if exchange.is_occupied(state_dir) and not replace:
        raise ConfigError(
            f"there is a state in {state_dir}: with --replace it is moved to a folder replaced-TIME in there"
        )
    draft = exchange.make_draft(state_dir)
    try:
        _stage(backup, manifest, draft, tell)
        _begin_epoch(draft / FACTS, manifest, meta_of(state_dir / FACTS))
        exchange.begin(state_dir)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return Restored(manifest, exchange.finish(state_dir))


def _begin_epoch(facts: Path, manifest: Manifest, replaced: Mapping[str, str]) -> None:
    """Begin an epoch above all that clients can have seen.

    The rounds of the restored database are counted in it.
    """
    rows = epoch_rows(manifest, meta_of(facts), replaced)
    try:
        with closing(sqlite3.connect(facts)) as connection:
            values = [tuple(values_of(row).values()) for row in rows]
            connection.executemany("INSERT OR REPLACE INTO meta (name, value, row_digest) VALUES (?, ?, ?)", values)
            connection.commit()
    except sqlite3.Error as error:
        raise BackupError(f"{facts} cannot be written ({error})") from error
    sync(facts)


def meta_of(facts: Path) -> dict[str, str]:
    """Return the table `meta` of a database; empty without one.

    It is also empty if it cannot be read. Nobody writes to it, but a server that was killed may have left rows in its
    log.
    """
    if not facts.exists():
        return {}
    reads = [partial(sqlite3.connect, f"{facts.absolute().as_uri()}?mode=ro", uri=True)] * log_of(facts).exists()
    for read in (*reads, partial(open_copy, facts)):
        with suppress(sqlite3.Error, UnicodeDecodeError), closing(read()) as connection:
            return dict(connection.execute("SELECT name, value FROM meta"))
    return {}


def _stage(backup: Path, manifest: Manifest, draft: Path, tell: Tell) -> None:
    """Copy the backup into `draft`, and check the copy.

    It must be complete, durable, and what the backup was made of.
    """
    contents = stage_facts(backup, manifest, draft)
    step = advancing(tell, manifest.bytes - (draft / FACTS).stat().st_size)
    with blaming(backup):
        for blob in contents.blobs:
            try:
                copy_blob(backup / BLOBS / blob.digest, draft / BLOBS / blob.digest, blob, step)
            except FileNotFoundError:
                raise blob.damage("is missing") from None
    sync(draft / BLOBS)


@contextmanager
def blaming(backup: Path) -> Iterator[None]:
    """Say that it is this backup whose blob is damaged."""
    try:
        yield
    except BackupError as error:
        raise BackupError(f"{backup} is damaged: {error}: use another backup") from error


def _copy(source: Path, target: Path) -> None:
    try:
        file = source.open("rb")
    except FileNotFoundError as error:
        raise BackupError(f"{source} is missing: use another backup") from error
    with file, create(target) as copy:
        shutil.copyfileobj(file, copy)
        make_durable(copy)
