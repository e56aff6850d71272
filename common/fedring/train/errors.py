"""The errors between the names in a job and a trained model.

Each text is one sentence that also says what to do.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedring.job_code import OwnError, job_code

_OF_THE_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}


class SeamError(OwnError):
    """Something that the user plugged in does not fit.

    It is a callable, a model, a device or a file.

    Attributes:
        reason: A stable word, which clients report to the server.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class TrainError(OwnError):
    """Training did not produce a usable model.

    Attributes:
        reason: A stable word, which clients report to the server.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@contextmanager
def on_disk(path: Path) -> Iterator[None]:
    """Clean up after a failed write in a `with` statement.

    If the disk is full or fails, the partial file is deleted.

    Raises:
        TrainError: With the reason disk_failed. The fault is of this worker, and not of the job's code.
    """
    try:
        yield
    except OSError as error:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        raise TrainError("disk_failed", f"{path} cannot be written: {error.strerror or error}.") from error


def failure_reason(error: Exception) -> str:
    """Return the reason for an error in a training.

    It is "out_of_memory", "disk_failed" or "train_error". The reasons have different consequences: another worker may
    have enough memory, but an error of the code happens everywhere.
    """
    import torch  # late: fl-server and flctl know these errors before they need it

    if isinstance(error, MemoryError | torch.cuda.OutOfMemoryError):  # which is torch.OutOfMemoryError from 2.5 on
        return "out_of_memory"
    return "disk_failed" if isinstance(error, OSError) and error.errno in _OF_THE_DISK else "train_error"


def failure_detail(error: BaseException) -> str:
    """Return an error in words: its type, its text and its notes.

    The notes say where it happened. The text of fedring's own errors is enough. An error of a job's code may fail to
    say its text.
    """
    if isinstance(error, OwnError):
        return str(error)
    try:
        with job_code():
            return "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    except Exception as other:  # noqa: BLE001  # as said
        return f"{type(error).__name__}, whose text cannot be told ({type(other).__name__})"


class TrainingStopped(Exception):
    """Training was asked to stop and did so.

    The model's values are undefined.
    """
