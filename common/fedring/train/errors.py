"""The errors between the names in a job and a trained model; each text is one sentence that also says what to do."""

import torch


class SeamError(Exception):
    """Something that the user plugged in does not fit: a callable, a model, a device or a file.

    Attributes:
        reason: A stable word, which clients report to the server.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class TrainError(Exception):
    """Training did not produce a usable model.

    Attributes:
        reason: A stable word, which clients report to the server.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def failure_reason(error: Exception) -> str:
    """Return the reason for an error of the user's code: "out_of_memory" or "train_error".

    They differ in what follows: another worker may have enough memory, but an error of the code happens everywhere.
    """
    return "out_of_memory" if isinstance(error, MemoryError | torch.OutOfMemoryError) else "train_error"


def failure_detail(error: Exception) -> str:
    """Return the error's type and text, and the notes that say where it happened."""
    return "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])


class TrainingStopped(Exception):
    """Training was asked to stop and did so; the model's values are undefined."""
