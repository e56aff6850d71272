"""Kinds of values that a job's keys take, bounded by what the wire and the database can carry.

The wire counts in `uint32` and `uint64`, SQLite in 64 bits with a sign. Tables of free content travel and are stored as
JSON: they must be finite in every sense.
"""

import unicodedata
from math import isfinite
from typing import Annotated, Any

from pydantic import AfterValidator, Field

MAX_COUNT = 2**32 - 1
"""The largest count: a `uint32` of the wire."""

MAX_SAMPLES = 1 << 40
"""The largest number of samples, of a round as of an update."""

MAX_WHOLE = 2**63 - 1
"""The largest magnitude of a whole number in a table of free content."""

MAX_SEED = 2**43 - 1
"""The largest seed: a round's own one, this times about a million, is below 2^63."""

MAX_SECONDS = 30 * 86400
"""The longest time of a round that a job can set, and that a client can say it has trained: 30 days."""

MAX_DEPTH = 16
"""Lists and tables that may lie in each other."""

MAX_JOB_BYTES = 1 << 16
"""A whole job as JSON: each command carries most of it, and lists of jobs carry many."""

_UNFIT = ("Cc", "Cs", "Zl", "Zp")  # controls, halves of a letter (no UTF-8), separators of lines


def check_text(text: str) -> str:
    """Check a name or another text of one line.

    Args:
        text: What somebody has written.

    Returns:
        The same text.

    Raises:
        ValueError: If it holds a control character, a separator of lines, or half of a letter, which has no UTF-8.
    """
    for letter in text:
        if unicodedata.category(letter) in _UNFIT:
            raise ValueError(f"must not hold the character U+{ord(letter):04X}")
    return text


def check_table(table: dict[str, Any]) -> dict[str, Any]:
    """Check a table of free content.

    Args:
        table: What JSON or TOML has made of it.

    Returns:
        The same table.

    Raises:
        ValueError: If it is too deep, or holds a number or a text that cannot be stored and sent as JSON.
    """
    waiting: list[tuple[str, Any, int]] = [("", table, 1)]
    while waiting:  # not by recursion: how deep the table is, its sender says
        path, value, depth = waiting.pop()
        if isinstance(value, dict | list | tuple):
            if depth > MAX_DEPTH:
                raise ValueError(f"must not hold more than MAX_DEPTH = {MAX_DEPTH} lists and tables in each other")
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
            raise ValueError(f"{path} in it must be text without NUL and halves of letters")
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
