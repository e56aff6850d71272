"""Types of a job's keys, bounded by wire and database.

The wire counts in `uint32` and `uint64`, and SQLite in signed 64-bit integers. Tables of free content travel and are
stored as JSON, so their depth, their numbers and their texts are bounded, too.
"""

import unicodedata
from math import isfinite
from typing import Annotated, Any

from pydantic import AfterValidator, Field

MAX_COUNT = 2**32 - 1
"""The largest count: a `uint32` of the wire."""

MAX_SAMPLES = 1 << 40
"""The largest number of samples in a round or an update."""

MAX_WHOLE = 2**63 - 1
"""The largest absolute value of an integer in a table of free content."""

MAX_SEED = 2**43 - 1
"""The largest seed of a job. The seed of a round is about a million times as large, and must stay below 2^63."""

MAX_SECONDS = 30 * 86400
"""The longest time limit that a job can set, and the longest training time that a client can report: 30 days."""

MAX_DEPTH = 16
"""How deep lists and tables may be nested."""

MAX_JOB_BYTES = 1 << 16
"""The largest job as JSON: each command carries most of a job, and a list of jobs carries many of them."""

_REFUSED_CATEGORIES = ("Cc", "Cs", "Zl", "Zp")  # control characters, surrogates (no UTF-8), line separators


def check_text(text: str) -> str:
    """Check a name or another text of one line.

    Args:
        text: A text from outside.

    Returns:
        The same text.

    Raises:
        ValueError: If it contains a control character, a line separator, or a surrogate, which UTF-8 cannot encode.
    """
    for character in text:
        if unicodedata.category(character) in _REFUSED_CATEGORIES:
            raise ValueError(f"must not hold the character U+{ord(character):04X}")
    return text


def check_table(table: dict[str, Any]) -> dict[str, Any]:
    """Check a table of free content.

    Args:
        table: The table as it was parsed from JSON or TOML.

    Returns:
        The same table.

    Raises:
        ValueError: If it is nested too deep, or contains a number or a text that cannot be stored and sent as JSON.
    """
    waiting: list[tuple[str, Any, int]] = [("", table, 1)]
    while waiting:  # without recursion, because the sender decides how deep the table is
        path, value, depth = waiting.pop()
        if isinstance(value, dict | list | tuple):
            if depth > MAX_DEPTH:
                raise ValueError(f"must not hold more than MAX_DEPTH = {MAX_DEPTH} levels of lists and tables")
            rows = value.items() if isinstance(value, dict) else enumerate(value)
            waiting += [(_join(path, key), inner, depth + 1) for key, inner in rows]
        else:
            _check_leaf(path, value)
    return table


def _join(path: str, key: str | int) -> str:
    try:
        check_text(str(key))
    except ValueError as error:
        raise ValueError(f"a key in it {error}") from None
    return f"{path}.{key}" if path else str(key)


def _check_leaf(path: str, value: Any) -> None:
    if isinstance(value, str):
        if "\0" in value or any(unicodedata.category(letter) == "Cs" for letter in value):
            raise ValueError(f"{path} in it must be text without NUL and without surrogates")
    elif isinstance(value, int):
        if abs(value) > MAX_WHOLE:
            raise ValueError(f"{path} in it must be a number from -(2^63 - 1) to 2^63 - 1")
    elif isinstance(value, float):
        if not isfinite(value):
            raise ValueError(f"{path} in it must be a finite number, and is {value}")
    elif value is not None:
        raise ValueError(f"{path} in it must be text, a number, true, false, a list or a table")


Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
PositiveCount = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, le=MAX_SECONDS, allow_inf_nan=False)]
Text = Annotated[str, AfterValidator(check_text)]
Table = Annotated[dict[str, Any], AfterValidator(check_table)]
