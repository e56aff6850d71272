"""Crash points, where a fault test ends the process abruptly.

The process ends as by kill -9.
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

SECURE_COMMITS = {
    f"{when}_secure_{what}_commit"
    for what in ("start", "keys", "roster", "shares", "peers", "survivors", "signature", "signers", "unmask")
    for when in ("before", "after")
}
"""Further crash points in fl-server, for jobs with secure aggregation: around the storing of clients' messages, and
around each decision that they are told of."""

SECURE_FAILURE = {"before_secure_failure_commit", "after_secure_failure_commit"}
"""The same, around the decision that the sum of a group will never be known."""

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


DELIVERING = {
    "client_left_spooled",
    "client_update_spooled",
    "client_accepted",
    "client_left_placed",
    "client_noted",
}
"""Every crash point in fl-client: around the spooling of an update, and around the note that it was accepted."""

SECURE = {f"client_secure_{step}" for step in ("begun", "roster", "peers", "payload", "survivors", "noted", "released")}
"""Further crash points in fl-client, for secure aggregation: each step is on the disk, and nothing of it was said."""

SECURE_CALLS = {
    f"client_secure_{call}_{when}"
    for call in ("SendKeys", "SendShares", "SignSurvivors", "SendUnmaskShares")
    for when in ("begun", "done")
}
"""The same, around each call of secure aggregation; when it is done, the server has taken the message."""

SECURE_END = {"client_secure_ended", "client_secure_removed"}
"""The same, at the end of such a round: when that is noted, and when the round's secrets are gone."""

TRAINING = {"worker_checkpoint_written"}
"""Every crash point in the training of a worker: a checkpoint is on the disk, but has not got its name."""


def crashpoint(name: str) -> None:
    """End the process at once if FL_CRASH_AT names this place."""
    if os.environ.get("FL_CRASH_AT") == name:
        os._exit(137)
