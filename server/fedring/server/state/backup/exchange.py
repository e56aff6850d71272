"""The exchange of a whole state for another one.

It stays within its folder, and uses renames alone.

    restoring/facts.sqlite      the new database; no server starts as long as it lies here
    restoring/blobs/            the new blobs, with their state_id
    restoring/replaced-TIME/    takes the old state, if there is one, and is then moved up into the state folder

The law: a process that is killed between two renames leaves a complete state, or one that fl-server refuses to start
on, and `finish`, called again, does the rest. The old database is moved before its log and before its blobs. The new
database comes when all its blobs are there. blobs/state_id is never missing in between: without it, the folder would
look as if no server had ever used it.
"""

import os
import shutil
from datetime import UTC, datetime
from pathlib import Path

from fedring.daemon.config import ConfigError
from fedring.daemon.crash import crashpoint
from fedring.daemon.durable import sync, write_durably
from fedring.server.state.files import BLOBS, FACTS, MOVED_TO, PARTIAL, STATE_ID

DRAFT = "restoring.partial"
_STAGED, _ASIDE = "restoring", "replaced-"


def is_pending(folder: Path) -> bool:
    """Return whether a state folder has an unfinished exchange."""
    return (folder / _STAGED / FACTS).exists()


def refuse_pending(folder: Path) -> None:
    """Check that a folder's state is in it.

    It has not left, and no exchange is pending.

    Raises:
        ConfigError: if it has, or if one is.
    """
    if (folder / MOVED_TO).exists():
        what = f"the state in {folder} is being moved to a database, or was moved there ({folder / MOVED_TO})"
        raise ConfigError(
            f"{what}: repeat flctl migrate if it was interrupted, or give state_url and blob_url. Nothing was changed."
        )
    if is_pending(folder):
        raise ConfigError(
            f"a restore into {folder} was interrupted: repeat flctl restore, which continues it. Nothing was changed."
        )


def is_occupied(folder: Path) -> bool:
    """Return whether a folder has a state, or a part of one."""
    blobs = folder / BLOBS
    return bool(facts_files(folder)) or (blobs.is_dir() and any(blobs.iterdir()))


def make_draft(folder: Path) -> Path:
    """Make the empty folder for the new state, and return it.

    The remains of an earlier restore are removed.
    """
    draft = folder / DRAFT
    shutil.rmtree(draft, ignore_errors=True)
    (draft / BLOBS).mkdir(mode=0o700, parents=True)
    draft.chmod(0o700)
    return draft


def begin(folder: Path) -> None:
    """Begin the exchange.

    From now on the draft, which is complete and durable, is the state that is to be there.

    Raises:
        ConfigError: if the old state's blobs lie on another file system, from where they cannot be renamed.
        OSError: if the disk failed. Nothing was changed in both cases.
    """
    draft, staged, old = folder / DRAFT, folder / _STAGED, folder / BLOBS
    if old.exists() and old.stat().st_dev != folder.stat().st_dev:
        raise ConfigError(f"{old} is on another file system than {folder}: restore into a folder of its own")
    if is_occupied(folder):
        aside = draft / _new_name(folder)
        (aside / BLOBS).mkdir(mode=0o700, parents=True)
        aside.chmod(0o700)
        if (old / STATE_ID).exists():
            write_durably(aside / BLOBS / STATE_ID, (old / STATE_ID).read_bytes())
        sync(aside / BLOBS)
        sync(aside)
    _adopt_all(draft, folder)
    sync(draft)
    shutil.rmtree(staged, ignore_errors=True)  # left by an exchange that lacked only its last step
    crashpoint("restore_staged")
    draft.rename(staged)
    sync(folder)
    crashpoint("restore_begun")


def finish(folder: Path) -> Path | None:
    """Finish the pending exchange.

    Returns:
        The folder of the old state, if this call has moved it there.
    """
    staged, blobs, replaced = folder / _STAGED, folder / BLOBS, None
    # A kill may have come between any two steps, so each of them does nothing if it was done before.
    if not blobs.exists():
        blobs.mkdir(mode=0o700)
        adopt(blobs, folder)
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
    (folder / MOVED_TO).unlink(missing_ok=True)  # of an earlier state
    # The database comes last: as long as it is staged, no server starts, and this can be repeated.
    (staged / FACTS).replace(folder / FACTS)
    sync(folder)
    crashpoint("restore_facts_placed")
    shutil.rmtree(staged, ignore_errors=True)  # the new state is there, and the next restore removes what is left
    return replaced


def _move_aside(folder: Path, aside: Path) -> None:
    for path in facts_files(folder):
        path.rename(aside / path.name)
        sync(aside)
        sync(folder)
        crashpoint("restore_facts_aside")
    if (partial := folder / PARTIAL).exists():
        partial.rename(aside / partial.name)
    for path in sorted((folder / BLOBS).iterdir()):
        if path.name != STATE_ID:
            path.rename(aside / BLOBS / path.name)
            crashpoint("restore_blob_aside")
    for changed in (aside / BLOBS, aside, folder / BLOBS, folder):
        sync(changed)


def _new_name(folder: Path) -> str:
    """Return a new name that tells the time."""
    first = name = f"{_ASIDE}{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    number = 1
    while (folder / name).exists():
        number += 1
        name = f"{first}-{number}"
    return name


def facts_files(folder: Path) -> list[Path]:
    """Return the database, then the files that SQLite keeps beside it."""
    return [path for path in [folder / FACTS, *sorted(folder.glob(f"{FACTS}-*"))] if path.exists()]


def _adopt_all(tree: Path, folder: Path) -> None:
    for path in [tree, *tree.rglob("*")]:
        adopt(path, folder)
    adopt(folder / "lock", folder)  # which root may just have made


def adopt(path: Path, folder: Path) -> None:
    """Give a path to the state folder's owner, if root restores.

    That is the server's user.
    """
    if os.geteuid() == 0:
        owner = folder.stat()
        os.chown(path, owner.st_uid, owner.st_gid)
