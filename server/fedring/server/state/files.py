"""The names in a state folder.

facts.sqlite         the database
blobs/<digest>       what the database names
blobs/state_id       the id of the state that both belong to
partial/<name>       what is still being written
unnamed/<name>       blobs that the database did not name at a start, and damaged logs, for some days
moved_to             that the state has moved to a database (`fedring.server.state.backup.departure`)
shared/              instead of all these: copies of objects and partials, if the state is shared with other servers
"""

from pathlib import Path

FACTS, BLOBS, PARTIAL, UNNAMED, STATE_ID = "facts.sqlite", "blobs", "partial", "unnamed", "state_id"
SHARED, MOVED_TO = "shared", "moved_to"


def database_url(folder: Path) -> str:
    """Return the URL of the database in a state folder, for Store."""
    return f"sqlite:///{folder / FACTS}"
