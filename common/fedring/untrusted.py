"""Texts of a peer, of a damaged disk, or of somebody's code."""

import json
from typing import Any


def parse_json(text: str | bytes | bytearray) -> Any:
    """Parse JSON that may be damaged or hostile.

    Raises:
        ValueError: It is no JSON, or holds more lists and tables in each other than Python can follow.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("too many lists and tables in each other") from None


def encodable(text: str) -> str:
    """Return a text that UTF-8 can encode, with escapes for the rest.

    Python names a file whose name is no UTF-8 by halves of surrogate pairs, which no message can carry.
    """
    return text.encode(errors="backslashreplace").decode()
