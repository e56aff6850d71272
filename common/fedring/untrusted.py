"""Texts of a peer or of a disk that may be damaged."""

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
