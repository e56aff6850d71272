"""The note of a state folder whose state moves elsewhere.

It goes into a database and an object store.

    moved_to             this module's Departure; as long as it is there, no server starts on the folder alone
    migrated-TIME/       the state that was in the folder, once the move is done

The law: the note is durable before the database commits. So at no time can a server go on with the folder, and another
one with the database.
"""

import json
import uuid
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path

from fedring.daemon.config import ConfigError
from fedring.daemon.crash import crashpoint
from fedring.daemon.durable import replace_durably, sync
from fedring.server.state.backup.exchange import adopt, facts_files
from fedring.server.state.files import BLOBS, MOVED_TO, PARTIAL, UNNAMED
from fedring.untrusted import parse_json


@dataclass(frozen=True, slots=True)
class Departure:
    """Where a state goes, as in the note."""

    state_url: str
    blob_url: str
    aside: str  # the name of the folder that takes what is left
    token: str  # which the database has, too, as soon as the state is there
    done: bool = False  # whether the state has left the folder


def new_departure(state_url: str, blob_url: str) -> Departure:
    """Return the note of a move that begins now."""
    return Departure(state_url, blob_url, f"migrated-{datetime.now(UTC):%Y%m%dT%H%M%SZ}", uuid.uuid4().hex)


def departure_of(folder: Path) -> Departure | None:
    """Return the note in a state folder; None if there is none.

    Raises:
        ConfigError: It cannot be read.
    """
    path = folder / MOVED_TO
    try:
        found = parse_json(path.read_text())
        departure = Departure(**found)
        if any(type(getattr(departure, field.name)) is not field.type for field in fields(Departure)):
            raise ValueError("of another type")
        if not departure.aside.startswith("migrated-") or "/" in departure.aside:
            raise ValueError(departure.aside)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} is not what flctl migrate writes ({error})") from error
    return departure


def note(folder: Path, departure: Departure) -> None:
    """Write the note durably."""
    replace_durably(folder / MOVED_TO, json.dumps(asdict(departure), indent=2).encode())
    adopt(folder / MOVED_TO, folder)


def leave(folder: Path, departure: Departure) -> Path:
    """Move the state's files aside, and return their new folder.

    It can be repeated if it was interrupted.
    """
    aside = folder / departure.aside
    aside.mkdir(mode=0o700, exist_ok=True)
    adopt(aside, folder)
    for path in [*facts_files(folder), *(folder / name for name in (BLOBS, PARTIAL, UNNAMED))]:
        if path.exists():
            path.rename(aside / path.name)
            crashpoint("migrate_moved_aside")
    sync(aside)
    note(folder, replace(departure, done=True))
    return aside


def forget(folder: Path) -> None:
    """Remove the note."""
    (folder / MOVED_TO).unlink(missing_ok=True)
    sync(folder)
