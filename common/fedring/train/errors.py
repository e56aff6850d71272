"""What can go wrong between a job's names and a trained model; each text is one sentence that says what to do."""

import torch


class SeamError(Exception):
    """What the user plugged in does not fit; `reason` is a stable word."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class TrainError(Exception):
    """Training could not give a usable model; `reason` is a stable word."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def verdict(error: Exception) -> str:
    """A stable word for what training has raised: "out_of_memory", which another worker may have, or "train_error"."""
    return "out_of_memory" if isinstance(error, MemoryError | torch.OutOfMemoryError) else "train_error"


def told(error: Exception) -> str:
    """The error's kind and text, and where it happened, as far as that was noted."""
    return "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])


class TrainingStopped(Exception):
    """Training was told to stop, and did; the model is in no defined state."""
