"""Moving a state from a folder to where servers share it.

Unlike a restore, it begins no new epoch: nothing is lost, and so that there are never two of it, the state leaves its
folder (`fedring.server.state.backup.departure`).
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fedring.daemon.config import ConfigError
from fedring.daemon.crash import crashpoint
from fedring.daemon.lock import StateInUse, StateLock
from fedring.server.state.backup.contents import BackupError, Contents, Tell, check_facts
from fedring.server.state.backup.create import FolderSource
from fedring.server.state.backup.departure import Departure, departure_of, forget, leave, new_departure, note
from fedring.server.state.files import BLOBS, FACTS
from fedring.server.state.rows import MetaRow
from fedring.server.state.shared.placing import SharedPlace, led_place

_DRAFT = "migrating.partial"
_TOKEN = "moved_by"  # in the table `meta`: which move has brought the state


@dataclass(frozen=True, slots=True)
class MovedState:
    """The result of a move."""

    aside: Path  # the folder that has what was in the state folder
    contents: Contents | None  # of the state; None if only the rest of an interrupted move was done


def move(state_dir: Path, state_url: str, blob_url: str, tell: Tell = lambda done, total: None) -> MovedState:
    """Move the state of a server that does not run.

    What is its machine's own stays in the folder: noise secrets, the audit log, receipts. An interrupted move can be
    repeated, and no server starts on the folder meanwhile.

    Args:
        state_dir: The server's state folder.
        state_url: Of a database without a state.
        blob_url: Of the object store.
        tell: Called with the number of bytes of blobs that have been written, and the number of all bytes.

    Raises:
        ConfigError: A server uses one of the two, there is no state to move, or there is one where it would go.
        BackupError: The state is damaged, or the disk, the database or the object store failed.
    """
    if not state_dir.is_dir():
        raise ConfigError(f"there is no folder {state_dir}: give the server's state_dir")
    with _locked(state_dir), led_place(state_url, blob_url) as place:
        begun = departure_of(state_dir)
        if begun is not None:
            if (begun.state_url, begun.blob_url) != (state_url, blob_url):
                where = f"{begun.state_url} and {begun.blob_url}"
                raise ConfigError(f"the state in {state_dir} was moved to {where}: give these addresses")
            if begun.done:
                raise ConfigError(f"the state in {state_dir} was moved there already: nothing is left to do")
            if place.meta().get(_TOKEN) == begun.token:
                return MovedState(leave(state_dir, begun), None)
            forget(state_dir)  # it was not committed, and no other process can do that now
        return _move(state_dir, new_departure(state_url, blob_url), place, tell)


def _move(state_dir: Path, departure: Departure, place: SharedPlace, tell: Tell) -> MovedState:
    source, draft = FolderSource(state_dir), state_dir / _DRAFT
    source.check()
    if place.meta():
        raise ConfigError("there is a state in the database that state_url names: give an empty one")
    if (state_dir / BLOBS).stat().st_dev != state_dir.stat().st_dev:
        raise ConfigError(f"{state_dir / BLOBS} is on another file system than {state_dir}: use backup and restore")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(mode=0o700)
    try:
        contents = source.snapshot(draft / FACTS)
        check_facts(draft / FACTS)
        place.refuse_strangers(contents.state_id)
        place.announce(contents.state_id)
        place.put_blobs(state_dir / BLOBS, contents.blobs, tell)
        token = MetaRow(_TOKEN, departure.token)
        place.put_rows(draft / FACTS, [token], lambda: note(state_dir, departure))
        place.tidy(contents.state_id, contents.blobs)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    crashpoint("migrate_placed")
    return MovedState(leave(state_dir, departure), contents)


@contextmanager
def _locked(state_dir: Path) -> Iterator[None]:
    try:
        with StateLock(state_dir):
            yield
    except StateInUse as error:
        holder = f"process {error.pid}" if error.pid else "another process"
        raise ConfigError(f"state_dir {state_dir} is in use by {holder}: stop fl-server first") from error
    except OSError as error:
        raise BackupError(
            f"cannot move {state_dir}: {error.strerror or error}: repeat it when it works again"
        ) from error
