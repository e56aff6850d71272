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
"""Every name in fl-server; the fault tests loop over all of them."""

RESTORING = {
    "restore_staged",
    "restore_begun",
    "restore_id_placed",
    "restore_facts_aside",
    "restore_blob_aside",
    "restore_moved_aside",
    "restore_blob_placed",
    "restore_blobs_placed",
    "restore_facts_placed",
}
"""Every name in `flctl restore`, one after each of its steps."""


def crashpoint(name: str) -> None:
    """End the process at once if FL_CRASH_AT names this place; else do nothing."""
    if os.environ.get("FL_CRASH_AT") == name:
        os._exit(137)
