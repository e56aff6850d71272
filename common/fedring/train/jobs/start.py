"""The key `start` of a job, as text in one spelling.

It says what the job starts from.
"""

from difflib import get_close_matches
from typing import Annotated

from pydantic import BeforeValidator, WithJsonSchema

from fedring.train.bounds import MAX_WHOLE, check_text

FRESH, NEWEST, BEST = WORDS = ("fresh", "newest", "best")


def spelled(start: object) -> str:
    """Return the canonical spelling of `start`.

    Args:
        start: "fresh", "newest", "best", the number of a version, or a path. 0 is an older spelling of "newest".

    Raises:
        ValueError: If it is none of these.
    """
    if isinstance(start, int) and not isinstance(start, bool):
        start = str(start)
    if not isinstance(start, str):
        raise ValueError(f"must be {_CHOICES}")
    if start.isascii() and start.isdigit():
        # The length first: int() of very long text takes quadratic time, or fails.
        if len(start) > len(str(MAX_WHOLE)) or int(start) > MAX_WHOLE:
            raise ValueError("must be a version of at most 2^63 - 1")
        return str(int(start)) if int(start) else NEWEST
    if start in WORDS:
        return start
    if not is_path(start):
        near = get_close_matches(start, WORDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "a path contains a slash or a dot"
        raise ValueError(f"must be {_CHOICES}, and is {start[:100]!r}: {hint}")
    return check_text(start)


def is_path(start: str) -> bool:
    """Return whether `start` names a file."""
    return "/" in start or "." in start


def version_of(start: str) -> int:
    """Return the version that `start` names; 0 if it names none."""
    return int(start) if start.isdigit() else 0


_CHOICES = "fresh, newest, best, the number of a version, or the path of a file"

Start = Annotated[
    str,
    BeforeValidator(spelled),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 0, "maximum": MAX_WHOLE}]}),
]
"""The type of the key: each of its values is validated into one spelling, so that equal jobs compare equal."""
