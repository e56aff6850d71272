"""Texts of a peer, of a damaged disk, or of somebody's code."""

import json
import re
from collections.abc import Callable
from typing import Any

_DEEPEST = 200  # lists and tables in each other
_MARKS = re.compile(r"[\[\]{}]")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*+\\?(?:"|\Z)', re.DOTALL)  # also one without an end: each text is read once


class TooDeep(ValueError):
    """JSON holds too many lists and tables in each other."""


def parse_json(text: str | bytes | bytearray, *, parse_int: Callable[[str], Any] | None = None) -> Any:
    """Parse JSON that may be damaged or hostile.

    Args:
        text: The JSON.
        parse_int: Makes a number of its digits; None = int().

    Raises:
        TooDeep: It holds too many lists and tables in each other.
        ValueError: It is no JSON.
    """
    if not isinstance(text, str):
        text = text.decode(json.detect_encoding(text), "surrogatepass")
    # Python would notice by itself, but with its stack used up: a collection of garbage that falls into that moment
    # fails in the finalizers of whatever it finds.
    if text.count("[") + text.count("{") > _DEEPEST and _depth_of(text) > _DEEPEST:
        raise TooDeep("too many lists and tables in each other")
    return json.loads(text, parse_int=parse_int)


def _depth_of(text: str) -> int:
    depth = deepest = 0
    for mark in _MARKS.findall(_STRING.sub("", text)):
        depth += 1 if mark in "[{" else -1
        deepest = max(deepest, depth)
    return deepest


def encodable(text: str) -> str:
    """Return a text that UTF-8 can encode, with escapes for the rest.

    Python names a file whose name is no UTF-8 by halves of surrogate pairs, which no message can carry.
    """
    return text.encode(errors="backslashreplace").decode()
