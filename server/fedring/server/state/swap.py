"""The exchange of a whole state for another one, in its own folder and by renames alone.

    restoring/facts.sqlite      the new database; as long as it lies here, no server starts
    restoring/blobs/            the new blobs, with their state_id
    restoring/replaced-TIME/    takes the old state, if there is one, and then goes up into the folder

The law: a process that is killed between two renames leaves a whole state, or one that fl-server refuses to start on,
and `finish`, called again, does the rest. The old database is moved before its log and before its blobs, the new one
comes when all its blobs are there, and blobs/state_id is never missing in between: without it, the folder would look
as if no server had ever used it.
"""

import os
import shutil
from datetime import UTC, datetime
from pathlib import Path

from fedring.daemon.config import ConfigError
from fedring.daemon.crash import crashpoint
from fedring.server.state.snapshot import create, sync

FACTS, BLOBS, STATE_ID = "facts.sqlite", "blobs", "state_id"
DRAFT = "restoring.partial"
_STAGED, _ASIDE = "restoring", "replaced-"


def is_pending(folder: Path) -> bool:
    """Return whether an exchange in this state folder has begun and not come to its end."""
    return (folder / _STAGED / FACTS).exists()


def refuse_pending(folder: Path) -> None:
    """Return if no exchange is pending; ConfigError if one is."""
    if is_pending(folder):
        raise ConfigError(
            f"a restore into {folder} was broken off: repeat flctl restore, which goes on with it. Nothing was changed."
        )


def is_occupied(folder: Path) -> bool:
    """Return whether there is a state in the folder, or a part of one."""
    blobs = folder / BLOBS
    return bool(_facts_files(folder)) or (blobs.is_dir() and any(blobs.iterdir()))


def make_draft(folder: Path) -> Path:
    """Make the empty folder that takes the new state, and return it; what an earlier restore left there is removed."""
    draft = folder / DRAFT
    shutil.rmtree(draft, ignore_errors=True)
    (draft / BLOBS).mkdir(mode=0o700, parents=True)
    draft.chmod(0o700)
    return draft


def begin(folder: Path) -> None:
    """Declare the draft, which is whole and durable, the state that is to be in the folder.

    Raises:
        ConfigError: if the blobs of the old state lie on another file system, from where they cannot be renamed.
        OSError: if the disk fails. In both cases nothing was changed.
    """
    draft, staged, old = folder / DRAFT, folder / _STAGED, folder / BLOBS
    if old.exists() and old.stat().st_dev != folder.stat().st_dev:
        raise ConfigError(f"{old} is on another file system than {folder}: restore into a folder of its own")
    if is_occupied(folder):
        aside = draft / _new_name(folder)
        (aside / BLOBS).mkdir(mode=0o700, parents=True)
        aside.chmod(0o700)
        if (old / STATE_ID).exists():
            with create(aside / BLOBS / STATE_ID) as file:
                file.write((old / STATE_ID).read_bytes())
                file.flush()
                os.fsync(file.fileno())
        sync(aside / BLOBS)
        sync(aside)
    _adopt_all(draft, folder)
    sync(draft)
    shutil.rmtree(staged, ignore_errors=True)  # of an exchange whose very last step was missing
    crashpoint("restore_staged")
    draft.rename(staged)
    sync(folder)
    crashpoint("restore_begun")


def finish(folder: Path) -> Path | None:
    """Do all that is left of the pending exchange; return where the old state is, if this call has put it there."""
    staged, blobs, replaced = folder / _STAGED, folder / BLOBS, None
    if not blobs.exists():
        blobs.mkdir(mode=0o700)
        _adopt(blobs, folder)
        sync(folder)
    if (new_id := staged / BLOBS / STATE_ID).exists():
        new_id.replace(blobs / STATE_ID)
        sync(blobs)
    crashpoint("restore_id_placed")
    for aside in staged.glob(f"{_ASIDE}*"):
        _move_aside(folder, aside)
        replaced = folder / aside.name
        aside.rename(replaced)
        sync(folder)
        sync(staged)
    crashpoint("restore_moved_aside")
    for path in sorted((staged / BLOBS).iterdir()):
        path.replace(blobs / path.name)
        crashpoint("restore_blob_placed")
    sync(blobs)
    crashpoint("restore_blobs_placed")
    (staged / FACTS).replace(folder / FACTS)
    sync(folder)
    crashpoint("restore_facts_placed")
    shutil.rmtree(staged)
    return replaced


def _move_aside(folder: Path, aside: Path) -> None:
    for path in _facts_files(folder):
        path.rename(aside / path.name)
        sync(aside)
        sync(folder)
        crashpoint("restore_facts_aside")
    if (partial := folder / "partial").exists():
        partial.rename(aside / partial.name)
    for path in sorted((folder / BLOBS).iterdir()):
        if path.name != STATE_ID:
            path.rename(aside / BLOBS / path.name)
            crashpoint("restore_blob_aside")
    for changed in (aside / BLOBS, aside, folder / BLOBS, folder):
        sync(changed)


def _new_name(folder: Path) -> str:
    """A name that says when, and that nothing in the folder has."""
    first = name = f"{_ASIDE}{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    number = 1
    while (folder / name).exists():
        number += 1
        name = f"{first}-{number}"
    return name


def _facts_files(folder: Path) -> list[Path]:
    """The database, then what SQLite keeps beside it."""
    return [path for path in [folder / FACTS, *sorted(folder.glob(f"{FACTS}-*"))] if path.exists()]


def _adopt_all(tree: Path, folder: Path) -> None:
    for path in [tree, *tree.rglob("*")]:
        _adopt(path, folder)
    _adopt(folder / "lock", folder)  # which may have been made a moment ago, by root


def _adopt(path: Path, folder: Path) -> None:
    """Give the path to the owner of the state folder, the server's user, where root restores."""
    if os.geteuid() == 0:
        owner = folder.stat()
        os.chown(path, owner.st_uid, owner.st_gid)
