"""Making a backup the state of servers that share one."""

from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from fedring.daemon.config import ConfigError
from fedring.server.state.backup.contents import BackupError, Tell
from fedring.server.state.backup.restore import (
    Restored,
    blaming,
    epoch_rows,
    meta_of,
    read_manifest,
    stage_facts,
)
from fedring.server.state.files import BLOBS, FACTS
from fedring.server.state.shared.placing import led_place
from fedring.server.state.shared.source import as_backup_errors


def restore_shared(
    backup: Path, state_url: str, blob_url: str, *, replace: bool = False, tell: Tell = lambda done, total: None
) -> Restored:
    """Make a backup the state in a database and an object store.

    Its rounds are counted in a new epoch. An interruption leaves the old state or the new one.

    Args:
        backup: A folder that `back_up` has made. It is only read.
        state_url: Of the database.
        blob_url: Of the object store.
        replace: If there is a state already, move its rows to a schema `replaced_TIME` of the database, and its
            objects below unnamed/.
        tell: Called with the number of bytes of blobs that have been written, and the number of all bytes.

    Raises:
        ConfigError: A server leads, there is a state already, or `backup` is not a backup that this program
            understands.
        BackupError: The backup is damaged, or the database or the object store failed. What was there before is there
            still, unless the message says that this is not known.
    """
    manifest = read_manifest(backup)
    with ExitStack() as stack:
        draft = Path(stack.enter_context(TemporaryDirectory(prefix="fedring-")))
        (draft / BLOBS).mkdir()
        try:
            contents = stage_facts(backup, manifest, draft)
        except OSError as error:
            raise BackupError(f"cannot copy {FACTS} of {backup} to {draft}: {error.strerror or error}") from error
        place = stack.enter_context(led_place(state_url, blob_url))  # only now: a damaged backup holds up no server
        there = place.meta()
        if there and not replace:
            raise ConfigError(
                "there is a state in the database that state_url names: "
                "with --replace it is moved to a schema replaced_TIME in there"
            )
        if not there:
            place.refuse_strangers(contents.state_id)
        rows = epoch_rows(manifest, meta_of(draft / FACTS), there)
        place.announce(contents.state_id)
        with blaming(backup):
            place.put_blobs(backup / BLOBS, contents.blobs, tell)
        replaced, left = place.put_rows(draft / FACTS, rows), ""
        try:
            with as_backup_errors():
                place.tidy(contents.state_id, contents.blobs)
        except BackupError as error:  # the new state is there all the same: a repeat would put it aside
            left = str(error)
    return Restored(manifest, replaced_schema=replaced, left=left)
