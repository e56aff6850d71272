"""The digests of rows, over their stored values.

A digest covers the name of the table and the columns in their order, so a column that is added, taken away or moved
changes all digests of its table (`fedring.server.state.sql.migrations`).
"""

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blake3 import blake3
from sqlalchemy import Table

_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Layout:
    """The columns that the digests of a table's rows cover.

    Attributes:
        table: Its name.
        numbers: The columns of numbers, in their order.
        texts: The others, of text or bytes.
        head: How the numbers, and the lengths of the texts, are written.
    """

    table: str
    numbers: tuple[str, ...]
    texts: tuple[str, ...]
    head: struct.Struct

    def digest(self, stored: Mapping[str, Any]) -> bytes:
        """Return the digest of a row's stored values."""
        # Binary, because to write numbers as text would take several times as long. No column holds a NaN: here, it
        # is NULL.
        figures = [math.nan if (number := stored[name]) is None else number for name in self.numbers]
        parts = [b"", b""]
        for name in self.texts:
            text = stored[name]
            if isinstance(text, str):  # SQLite tells text from bytes by one bit, which may flip, too.
                parts.append(part := text.encode())
                figures.append(2 * len(part) + 1)
            elif text is None:
                figures.append(-1)
            else:
                parts.append(text)
                figures.append(2 * len(text))
        parts[:2] = self.table.encode(), self.head.pack(*figures)
        return blake3(b"".join(parts)).digest(_DIGEST_BYTES)

    def is_sound(self, digest: bytes, stored: Mapping[str, Any]) -> bool:
        """Return whether stored values have a digest."""
        try:
            return digest == self.digest(stored)
        except (struct.error, TypeError):  # a value of another type than its column's: SQLite keeps both
            return False


def layout_of(table: Table, covered: Sequence[str]) -> Layout:
    """Return the layout of a table.

    Args:
        table: The table, as it is defined here or was found in a database.
        covered: Its columns that the digest covers, in the order of their definition.
    """
    codes = {name: {int: "q", float: "d"}.get(table.c[name].type.python_type, "") for name in covered}
    numbers, texts = (tuple(name for name in covered if bool(codes[name]) is wanted) for wanted in (True, False))
    head = struct.Struct(f"<{''.join(codes[name] for name in numbers)}{len(texts)}q")
    return Layout(table.name, numbers, texts, head)
