"""Proof that a database and a folder of blobs are parts of one state.

A random id lies in the database and, as `blobs/state_id`, beside the blobs. Without it, a database that was lost or
exchanged would name none of the blobs, and all of them would be swept.
"""

import os
import re
import sqlite3
import uuid
from contextlib import closing
from pathlib import Path

from fedring.codec.digest import is_name
from fedring.server.state.blobs import FileBlobs, StorageError
from fedring.server.state.database import meaning_of
from fedring.server.state.store import SqlStore
from fedring.server.state.swap import FACTS, STATE_ID, refuse_pending

_ID, _DRAFT = STATE_ID, "state_id.new"
_HEX = re.compile(r"[0-9a-f]{32}")
_WAY = "Restore a backup (flctl restore), or give the server an empty folder. Nothing was changed."


def open_state(folder: Path, *, adopt: bool = True) -> tuple[SqlStore, FileBlobs]:
    """Open the database and the blobs of the state in `folder`, or begin one there.

    A state from before there were ids is given one, if `adopt`.

    Raises:
        StorageError: "wrong_state" if one of the two is missing or of another state; then nothing was changed. Else
            what the database or the disk has to say.
        ConfigError: if a restore into the folder was broken off.
    """
    refuse_pending(folder)
    blobs = folder / "blobs"
    version, stored = _peek(folder / FACTS)
    beside, draft = read_id(blobs / _ID), _read_draft(blobs / _DRAFT)
    if not version and (beside or holds_blobs(blobs)):
        raise StorageError("wrong_state", f"{FACTS} is missing or empty, but blobs/ holds a state. {_WAY}")
    if stored != beside and not (stored == draft and not beside):
        what = f"{FACTS} and blobs/ are of different states" if beside else "blobs/ is missing or of another state"
        raise StorageError("wrong_state", f"{what}. {_WAY}")
    files = FileBlobs(folder)
    store = SqlStore(f"sqlite:///{folder / FACTS}")
    if adopt and not beside:
        # First the draft, which alone means nothing, then the database: a start that is killed anywhere is repeated.
        if not stored:
            if version and holds_blobs(blobs) and not store.named_blobs():  # a new database where one was lost
                store.close()
                raise StorageError("wrong_state", f"{FACTS} names none of the files in blobs/. {_WAY}")
            draft = uuid.uuid4().hex
            _write(blobs / _DRAFT, draft)
            files.sync()
            store.set_state_id(draft)
        (blobs / _DRAFT).replace(blobs / _ID)
        files.sync()
    return store, files


def read_id(path: Path) -> str:
    """Return the id in the file; empty if there is none."""
    try:
        text = path.read_text().strip()
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError("wrong_state", f"{path} cannot be read: {error}") from error
    if not _HEX.fullmatch(text):
        raise StorageError("wrong_state", f"{path} holds no id. {_WAY}")
    return text


def _read_draft(path: Path) -> str:
    """The id in the draft; empty if there is none, or one that was not written to its end."""
    text = path.read_text(errors="replace").strip() if path.exists() else ""
    return text if _HEX.fullmatch(text) else ""


def holds_blobs(blobs: Path) -> bool:
    """Return whether there is any blob in the folder, which may be missing."""
    return blobs.is_dir() and any(is_name(path.name) for path in blobs.iterdir())


def _peek(facts: Path) -> tuple[int, str]:
    """The database's schema version, 0 if there is no database, and its state id, empty if it has none."""
    if not facts.exists():
        return 0, ""
    try:
        with closing(sqlite3.connect(f"{facts.absolute().as_uri()}?mode=rw", uri=True)) as connection:
            version = int(connection.execute("PRAGMA user_version").fetchone()[0])
            row = connection.execute("SELECT value FROM meta WHERE name = 'state_id'").fetchone() if version else None
    except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter has the words of the former
        raise meaning_of(error) from error
    return version, str(row[0]) if row else ""


def _write(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
