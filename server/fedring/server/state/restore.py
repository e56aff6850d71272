"""A backup becomes the state of a server again.

First the backup is copied into the state folder, beside what is there, and every byte of the copy is proven. Only then
are the two exchanged (`fedring.server.state.swap`).
"""

import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from fedring.daemon.config import ConfigError
from fedring.daemon.lock import StateInUse, StateLock
from fedring.server.state import swap
from fedring.server.state.database import StoreError, epoch_in
from fedring.server.state.snapshot import (
    MANIFEST,
    BackupError,
    Manifest,
    NamedBlob,
    Tell,
    check_facts,
    copy_blob,
    create,
    digest_of,
    open_copy,
    parse_manifest,
    read_contents,
    sync,
)
from fedring.server.state.swap import BLOBS, FACTS, STATE_ID

_EPOCH, _ORIGIN = "epoch", "restored_from"  # in the table `meta`: the epoch, and the backup's digest of its database


@dataclass(frozen=True, slots=True)
class Restored:
    """What a restore did.

    Attributes:
        manifest: what is in the state now.
        replaced: where the state of before is; None if there was none.
        finished: only what was left of a restore that had been broken off was done.
    """

    manifest: Manifest
    replaced: Path | None = None
    finished: bool = False


def restore(backup: Path, state_dir: Path, *, replace: bool = False, tell: Tell = lambda done, total: None) -> Restored:
    """Make the backup the state in `state_dir`.

    Args:
        backup: a folder that `back_up` has made; it is only read.
        state_dir: the state folder of a server that does not run; it is made if it is missing.
        replace: if there is a state already, move it to a folder `replaced-TIME` within.
        tell: is called with the bytes of blobs that are copied, and those to copy.

    Raises:
        ConfigError: if the folder is in use or holds a state, or `backup` is no backup that this program understands.
        BackupError: if the backup is damaged, or the disk fails. The state of before is whole and in its place; but
            if the disk failed during the exchange, the server does not start before the restore is repeated.
    """
    manifest = read_manifest(backup)
    try:
        with StateLock(state_dir):
            return _restore(backup, manifest, state_dir, replace=replace, tell=tell)
    except StateInUse as error:
        holder = f"process {error.pid}" if error.pid else "another process"
        raise ConfigError(f"state_dir {state_dir} is in use by {holder}: stop fl-server first") from error
    except OSError as error:
        way = ": repeat the restore when that is mended" if swap.is_pending(state_dir) else ""
        raise BackupError(f"cannot restore into {state_dir}: {error.strerror or error}{way}") from error


def read_manifest(backup: Path) -> Manifest:
    """Return what the backup says of itself.

    Raises:
        ConfigError: if the folder is no backup.
    """
    path = backup / MANIFEST
    try:
        text = path.read_text()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(f"{backup} is no whole backup, it has no {MANIFEST}: name one of flctl backup") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    return parse_manifest(text, path)


def _restore(backup: Path, manifest: Manifest, state_dir: Path, *, replace: bool, tell: Tell) -> Restored:
    if swap.is_pending(state_dir):
        replaced = swap.finish(state_dir)
        if _meta(state_dir / FACTS).get(_ORIGIN) == manifest.facts_digest:
            return Restored(manifest, replaced, finished=True)
    if swap.is_occupied(state_dir) and not replace:
        raise ConfigError(
            f"there is a state in {state_dir}: with --replace it is moved to a folder replaced-TIME in there"
        )
    draft = swap.make_draft(state_dir)
    try:
        _stage(backup, manifest, draft, tell)
        _begin_epoch(draft / FACTS, manifest, _meta(state_dir / FACTS))
        swap.begin(state_dir)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return Restored(manifest, swap.finish(state_dir))


def _begin_epoch(facts: Path, manifest: Manifest, replaced: Mapping[str, str]) -> None:
    """Count the rounds of the restored database in an epoch above all that clients can have seen.

    A backup can be restored twice: the time tells the two apart.
    """
    try:
        epoch = max(int(time.time()), epoch_in(_meta(facts)) + 1)
        with suppress(StoreError):  # a state is also replaced because it is damaged
            epoch = max(epoch, epoch_in(replaced) + 1)
        values = {_EPOCH: str(epoch), _ORIGIN: manifest.facts_digest}
        with closing(sqlite3.connect(facts)) as connection:
            connection.executemany("INSERT OR REPLACE INTO meta (name, value) VALUES (?, ?)", values.items())
            connection.commit()
    except StoreError as error:
        raise BackupError(f"{FACTS} in the backup is damaged, its epoch is no number: use another backup") from error
    except sqlite3.Error as error:
        raise BackupError(f"{facts} cannot be written ({error})") from error
    sync(facts)


def _meta(facts: Path) -> dict[str, str]:
    """What a database says of its state; nothing if it is no database, or there is none."""
    if not facts.exists():
        return {}
    try:
        with closing(open_copy(facts)) as connection:
            return dict(connection.execute("SELECT name, value FROM meta"))
    except (sqlite3.Error, UnicodeDecodeError):
        return {}


def _stage(backup: Path, manifest: Manifest, draft: Path, tell: Tell) -> None:
    """Copy the backup into `draft`, and return if the copy is whole, durable, and what the server had."""
    facts = draft / FACTS
    _copy(backup / FACTS, facts)
    if digest_of(facts) != manifest.facts_digest:
        raise BackupError(f"{backup / FACTS} does not hold what was written to it: use another backup")
    contents = read_contents(facts)
    check_facts(facts)
    _copy(backup / BLOBS / STATE_ID, draft / BLOBS / STATE_ID)
    ids = {manifest.state_id, contents.state_id, (draft / BLOBS / STATE_ID).read_text(errors="replace").strip()}
    if len(ids) > 1:
        raise BackupError(f"{FACTS} and {BLOBS}/ in {backup} are of different states: use another backup")
    done, total = 0, manifest.bytes - facts.stat().st_size

    def step(count: int) -> None:
        nonlocal done
        done += count
        tell(done, total)

    for blob in contents.blobs:
        _copy_blob(backup, draft, blob, step)
    sync(draft / BLOBS)


def _copy_blob(backup: Path, draft: Path, blob: NamedBlob, step: Callable[[int], None]) -> None:
    try:
        copy_blob(backup / BLOBS / blob.digest, draft / BLOBS / blob.digest, blob, step)
    except FileNotFoundError:
        raise BackupError(f"{backup} is damaged: {blob.damage('is missing')}: use another backup") from None
    except BackupError as error:
        raise BackupError(f"{backup} is damaged: {error}: use another backup") from error


def _copy(source: Path, target: Path) -> None:
    try:
        file = source.open("rb")
    except FileNotFoundError as error:
        raise BackupError(f"{source} is missing: use another backup") from error
    with file, create(target) as copy:
        shutil.copyfileobj(file, copy)
        copy.flush()
        os.fsync(copy.fileno())
