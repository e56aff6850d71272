"""Parts of sentences, and Pydantic's findings in words that state demands."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

_WHOLE, _NUMBER, _BOOL = "must be a whole number", "must be a number", "must be true or false"
_TABLE, _LIST = "must be a table of keys", 'must be a list, such as ["a", "b"]'
_WORDS = {
    "missing": "must be given",
    "extra_forbidden": "is no key",
    "int_type": _WHOLE,
    "int_parsing": _WHOLE,
    "int_parsing_size": _WHOLE,
    "int_from_float": _WHOLE,
    "float_type": _NUMBER,
    "float_parsing": _NUMBER,
    "bool_type": _BOOL,
    "bool_parsing": _BOOL,
    "path_type": "must be a path",
    "list_type": _LIST,
    "dict_type": _TABLE,
    "model_type": _TABLE,
    "model_attributes_type": _TABLE,
}
_MOST_SHOWN = 60  # characters of a value
_SHOULD = re.compile(r"^\w+ should ")  # "Input should be greater than 0", "String should have at least 1 character"


def word(found: Mapping[str, Any], description: str = "") -> str:
    """Return the demand on a value, such as "must be a number".

    Args:
        found: one of a ValidationError's errors().
        description: that of the key.
    """
    kind = found["type"]
    if kind == "string_pattern_mismatch" and description:
        return f"must be a {description}"
    if kind == "string_type":
        given = found["input"]
        return f'must be text: "{given}", with the quotes' if isinstance(given, int | float) else "must be text"
    return _WORDS.get(kind) or _SHOULD.sub("must ", found["msg"].removeprefix("Value error, "))


def given(found: Mapping[str, Any]) -> str:
    """Return ", not 1.5" for a value of 1.5.

    It is empty if the sentence needs no value, or if the value is long.
    """
    value = found["input"]
    shown = repr(value) if isinstance(value, str | int | float | list) else ""
    said = found["type"] in ("missing", "extra_forbidden", "value_error", "string_type")
    return f", not {shown}" if shown and not said and len(shown) <= _MOST_SHOWN else ""


def either(texts: list[str]) -> str:
    """Join alternatives into one clause: "must be text or a list"."""
    first, *others = dict.fromkeys(texts)
    return " or ".join([first, *(other.removeprefix("must be ") for other in others)])


def counted(count: int, noun: str) -> str:
    """Format a number of things, such as "1 round" or "3 rounds"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def listed(names: Sequence[str], most: int = 10) -> str:
    """Format names for a sentence: the first ones, and how many more."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
