"""Crash points: places at which a fault test ends the process as kill -9 would."""

import os

REGISTERED = {
    "after_blob_fsync",
    "after_blob_rename",
    "before_row_commit",
    "after_row_commit",
    "before_publish_commit",
    "after_publish_commit",
}
"""Every name; the fault tests loop over all of them."""


def crashpoint(name: str) -> None:
    """End the process at once if FL_CRASH_AT names this place; else do nothing."""
    if os.environ.get("FL_CRASH_AT") == name:
        os._exit(137)
