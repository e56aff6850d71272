"""Opening a state folder whose database and blobs belong together.

A random id lies in the database and, as `blobs/state_id`, beside the blobs. Without it, a database that was lost or
exchanged would name none of the blobs, and all of them would be swept.
"""

import logging
import re
import uuid
from pathlib import Path

from fedring.codec.digest import is_name
from fedring.daemon.config import ConfigError
from fedring.daemon.durable import write_durably
from fedring.server.state.backup.exchange import refuse_pending
from fedring.server.state.blobs import FileBlobs
from fedring.server.state.failures import StorageError, StoreError
from fedring.server.state.files import BLOBS, FACTS, SHARED, STATE_ID, database_url
from fedring.server.state.log_check import check_at_rest, check_log, keep_log, peek
from fedring.server.state.rows import TokenRow
from fedring.server.state.sql.database import LOG_BYTES
from fedring.server.state.sql.store import Store

log = logging.getLogger(__name__)

_DRAFT = f"{STATE_ID}.new"
_HEX = re.compile(r"[0-9a-f]{32}")
_ADVICE = "Restore a backup (flctl restore), or give the server an empty folder. Nothing was changed."


def open_state(
    folder: Path, *, adopt: bool = True, accept_older: bool = False, log_bytes: int = LOG_BYTES
) -> tuple[Store, FileBlobs]:
    """Open a state folder's database and blobs.

    They are created in an empty folder, and those of an older version are migrated.

    Args:
        folder: the state folder, which the caller has locked (StateLock).
        adopt: give an id to a state that has none, because it is new.
        accept_older: go on with what a damaged log leaves of the database, in a new epoch.
        log_bytes: how long the database's log may become.

    Raises:
        StorageError: "wrong_state" if one of the two is missing or belongs to another state, "older_state" or
            "newer_state" if another version has written it, "lost_commits" if the database's log is damaged; nothing
            was changed then. Another reason if the database or the disk cannot be used.
        ConfigError: if a restore into the folder was interrupted.
    """
    refuse_pending(folder)
    lost = _lost_commits(folder)  # before SQLite, which would end the log in silence
    if lost and not accept_older:
        raise lost
    blobs = folder / BLOBS
    version, stored = peek(folder / FACTS)
    if lost:
        log.warning("goes on all the same: %s", lost)
        keep_log(folder)
    beside, draft = read_id(blobs / STATE_ID), _read_draft(blobs / _DRAFT)
    if (not version and beside) or (not stored and holds_blobs(blobs)):
        raise StorageError("wrong_state", f"{FACTS} is missing, empty or new, but {BLOBS}/ holds a state. {_ADVICE}")
    if stored != beside and not (stored == draft and not beside):
        what = f"{FACTS} and {BLOBS}/ belong to different states"
        if not beside:
            what = f"{BLOBS}/ is missing or belongs to another state"
        raise StorageError("wrong_state", f"{what}. {_ADVICE}")
    files = FileBlobs(folder)
    store = Store(database_url(folder), log_bytes=log_bytes, migrates=True)
    if lost:
        store.begin_epoch()  # a start that is killed before this finds the damage again
    if adopt and not beside:
        # The draft comes first, which means nothing by itself, then the database. A start that is killed in between
        # is simply repeated.
        if not stored:
            draft = uuid.uuid4().hex
            write_durably(blobs / _DRAFT, f"{draft}\n".encode())
            files.sync()
            store.set_state_id(draft)
        (blobs / _DRAFT).replace(blobs / STATE_ID)
        files.sync()
    store.shorten_log()  # without what a torn commit has left there, which could look like damage beside new commits
    return store, files


def add_token_offline(folder: Path, row: TokenRow) -> None:
    """Add a token to a server's state.

    The server may be running.

    Raises:
        ConfigError: if there is no such folder, or a restore into it was interrupted.
        StorageError: if the database cannot be used, is another version's, or its log is damaged.
    """
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}: give the server's state_dir")
    if (folder / SHARED).exists():
        raise ConfigError(f"{folder} is of a server with state_url: use flctl token create without --state-dir")
    refuse_pending(folder)
    check_at_rest(folder)
    store = Store(database_url(folder))
    try:
        store.tokens.add(row)
    finally:
        store.close()


def read_id(path: Path) -> str:
    """Return the id in a file; empty if there is no file.

    Raises:
        StorageError: "wrong_state", if the file cannot be read or holds no id.
    """
    try:
        text = path.read_text().strip()
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError("wrong_state", f"{path} cannot be read: {error}") from error
    if not _HEX.fullmatch(text):
        raise StorageError("wrong_state", f"{path} holds no id. {_ADVICE}")
    return text


def _lost_commits(folder: Path) -> StoreError | None:
    try:
        check_log(folder / FACTS)
    except StoreError as error:
        return error
    return None


def _read_draft(path: Path) -> str:
    """Return the id in the draft; empty without a complete draft."""
    text = path.read_text(errors="replace").strip() if path.exists() else ""
    return text if _HEX.fullmatch(text) else ""


def holds_blobs(blobs: Path) -> bool:
    """Return whether there is a blob in the folder.

    The folder need not exist.
    """
    return blobs.is_dir() and any(is_name(path.name) for path in blobs.iterdir())
