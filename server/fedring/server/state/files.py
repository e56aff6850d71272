"""The names in a state folder, and small files that are written durably.

facts.sqlite         the database
blobs/<digest>       what the database names
blobs/state_id       the id of the state that both belong to
partial/<name>       what is still being written
"""

import os
from pathlib import Path
from typing import Any

FACTS, BLOBS, PARTIAL, STATE_ID = "facts.sqlite", "blobs", "partial", "state_id"


def database_url(folder: Path) -> str:
    """Return the URL of the database in a state folder, for SqlStore."""
    return f"sqlite:///{folder / FACTS}"


def create(path: Path) -> Any:
    """Open a file for writing that only its owner may read. A file that is there is emptied."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb")


def write_durably(path: Path, data: bytes) -> None:
    """Write a whole file and sync it. Its name is durable once its folder has been synced, too."""
    with create(path) as file:
        file.write(data)
        make_durable(file)


def make_durable(file: Any) -> None:
    """Make all that was written to an open file durable."""
    file.flush()
    os.fsync(file.fileno())
