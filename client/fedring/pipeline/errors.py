"""How a pipeline fails."""

from collections.abc import Iterator
from contextlib import contextmanager


class PipelineError(RuntimeError):
    """A stage cannot go on; what it did in this run is not to be relied on."""


class CutError(ValueError):
    """The model cannot be cut in this way."""


@contextmanager
def noted(where: str) -> Iterator[None]:
    """What is raised inside, by a model or a loss of the user's as a rule, carries the note where it was."""
    try:
        yield
    except Exception as error:  # it goes on as it is
        error.add_note(where)
        raise
