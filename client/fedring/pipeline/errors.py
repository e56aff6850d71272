"""The errors of pipelines, and notes on where they were raised."""

from collections.abc import Iterator
from contextlib import contextmanager


class PipelineError(RuntimeError):
    """A stage cannot go on.

    The results of this run must not be used.
    """


class CutError(ValueError):
    """The model cannot be cut into these stages."""


@contextmanager
def add_note(where: str) -> Iterator[None]:
    """Add a note to any exception from inside the context.

    Usually a user's model or loss has raised it.
    """
    try:
        yield
    except Exception as error:
        error.add_note(where)
        raise


def described(error: BaseException) -> str:
    """Return an error's type, text and notes."""
    return "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
