"""Failures of the server's state: a failing disk, and damaged files."""

from collections.abc import Iterable

from grpc import StatusCode

from fedring.job_code import OwnError
from fedring.rpc.errors import FedringError, Overloaded, Unavailable
from fedring.server.state.files import BLOBS, FACTS
from fedring.server.state.rows import ModelRow, UpdateRow


class StorageError(OwnError):
    """Something could not be written or read.

    Attributes:
        reason: a stable metric label.
        detail: what happened, for people.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail


class StorageFailed(StorageError, Overloaded):
    """The disk is full or failed, or no descriptor is left.

    The reasons are "disk_full", "disk_error" and "too_many_files". Nothing was changed, and a later attempt may
    succeed.
    """


class FsyncFailed(Unavailable):
    """A sync failed.

    The kernel may have dropped bytes that it could not write. Nothing that was written since the last sync can be
    trusted: the daemon must exit, and recover from the disk. Callers are told so.

    Args:
        detail: what the system says.
    """

    def __init__(self, detail: str = "") -> None:
        super().__init__(
            f"a sync to the disk failed ({detail}): the server ends, and recovers when it is started again"
        )


class Deposed(FsyncFailed):
    """This server leads no more, or the database cannot be reached.

    Only what the database has said to be committed can be trusted. The daemon must exit, and start again as a standby.

    Args:
        why: a sentence without its full stop.

    Attributes:
        why: the same.
    """

    def __init__(self, why: str) -> None:
        self.why = why
        Unavailable.__init__(self, f"{why}: the server ends, and starts again as a standby")


class StoreError(StorageError):
    """The database cannot be used, or does not allow a change.

    Its reasons are "older_state", "newer_state", "corrupt", "lost_commits", "no_backup" and "database".
    """


class DamagedBlob(StorageError, FedringError):
    """The bytes of a blob or an update have another digest.

    They are named by their digest. The bytes of an update may lie in a row.

    Attributes:
        digest: the name; it is the blob's name if the bytes lie in a blob.
        what: what is wrong, for people: a clause that follows the name.
    """

    status = StatusCode.DATA_LOSS

    def __init__(self, digest: str, what: str, text: str = "") -> None:
        super().__init__("damaged_blob", text or f"{BLOBS}/{digest} {what}")
        self.digest, self.what = digest, what


class DamagedModel(DamagedBlob):
    """A file of a published model is damaged.

    Args:
        row: the model.
        error: what is wrong with the file.
        advice: what the operator can do.

    Attributes:
        version: the model's version.
    """

    def __init__(self, row: ModelRow, error: DamagedBlob, advice: str) -> None:
        text = f"model {row.version} is damaged: {BLOBS}/{error.digest} {error.what}: {advice}"
        super().__init__(error.digest, error.what, text)
        self.version = row.version


class DamagedUpdates(StorageError):
    """Accepted updates are damaged.

    Attributes:
        clients: by client id, a sentence that says what is wrong with the client's update.
    """

    def __init__(self, damaged: Iterable[tuple[UpdateRow, str]]) -> None:
        self.clients: dict[str, str] = {}
        for row, what in damaged:
            place = f"{BLOBS}/{row.blob}" if row.blob else f"in {FACTS}"
            self.clients[row.client_id] = f"the accepted update of {row.client_id} ({place}) {what}"
        super().__init__("damaged_blob", "; ".join(self.clients.values()))
