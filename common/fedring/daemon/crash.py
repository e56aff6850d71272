"""Crash points, where a fault test ends the process abruptly.

The process ends as by kill -9. A room whose rounds have steps of their own lists its crash points itself.
"""

import os

REGISTERED = {
    "after_blob_fsync",
    "after_blob_rename",
    "before_row_commit",
    "after_row_commit",
    "before_publish_commit",
    "after_publish_commit",
}
"""Every crash point in fl-server; the fault tests loop over all of them."""

SHARED = {"after_object_put"}
"""Further ones of a server whose state is in a database and an object store."""

MIGRATING = ("migration_checked", "migration_made", "migration_committed")
"""The crash points in the migration of an older version's tables, in their order."""

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
"""Every crash point in `flctl restore`, one after each of its steps."""

PLACING = (
    "shared_id_added",
    "shared_blobs_written",
    "shared_rows_written",
    "shared_rows_committed",
)
"""The crash points in `flctl restore` and `flctl migrate` into a database, in their order."""

REPLACING = (*PLACING, "shared_object_aside")
"""The crash points in a restore into a database that replaces a state."""

MOVING = (*PLACING, "migrate_placed", "migrate_moved_aside")
"""The crash points in `flctl migrate`, in their order."""


DELIVERING = {
    "client_left_spooled",
    "client_update_spooled",
    "client_accepted",
    "client_left_placed",
    "client_noted",
}
"""Every crash point in fl-client: around the spooling of an update, and around the note that it was accepted."""

CHAINED = ("chain_line_{}_begun", "chain_line_{}_written")
"""The crash points around each write of a chained log; {} stands for the number of the last line that it writes."""

TRAINING = {"worker_checkpoint_written"}
"""Every crash point in the training of a worker: a checkpoint is on the disk, but has not got its name."""


def crashpoint(name: str) -> None:
    """End the process at once if FL_CRASH_AT names this place."""
    if os.environ.get("FL_CRASH_AT") == name:
        os._exit(137)
