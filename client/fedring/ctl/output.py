"""The output of verbs: tables for people, or JSON for programs.

A program gets one JSON object. stdout is for data, stderr for everything that people read meanwhile.
"""

import base64
import json
import sys
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedring.daemon.logs import visible

_INT64 = {
    FieldDescriptor.TYPE_INT64,
    FieldDescriptor.TYPE_UINT64,
    FieldDescriptor.TYPE_SINT64,
    FieldDescriptor.TYPE_FIXED64,
    FieldDescriptor.TYPE_SFIXED64,
}
_ANY_WIDTH = 10_000  # columns in which every table fits
_PIPE_WIDTH = 240  # columns of a table that is not printed on a terminal, wide enough to cut nothing off


class Output(StrEnum):
    """How a verb prints its data."""

    TABLE = "table"
    JSON = "json"


def to_dict(message: Message) -> dict[str, Any]:
    """Return all fields of a message by their names in the .proto.

    A field that is absent is None, a 64-bit number is an int, and bytes are hexadecimal text.
    """
    table = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return _natural(table, message.DESCRIPTOR)


def print_json(value: Any) -> None:
    """Print one JSON object on stdout.

    It is indented if that is a terminal, else on one line.
    """
    print(json.dumps(value, indent=2 if sys.stdout.isatty() else None), flush=True)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table on stdout.

    A column whose name ends in ">" is aligned to the right, and its values stay on one line. Where a terminal is too
    narrow for that, each row becomes a paragraph of names and values.
    """
    console, cells = stdout_console(), [list(row) for row in rows]
    table = make_table(title, columns, cells)
    needed = console.measure(table, options=console.options.update_width(_ANY_WIDTH)).minimum
    if needed <= console.width:
        console.print(table)
    else:
        console.print(_paragraphs(title, columns, cells))


def make_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return the table that print_table prints where it fits."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    cells = list(rows)
    for at, column in enumerate(columns):
        texts = [column.removesuffix(">"), *(row[at] for row in cells)]
        right = column.endswith(">")
        # Words stay whole, which rich would divide.
        parts = texts if right else [word for text in texts for word in text.split()]
        longest = max((cell_len(part) for part in parts), default=0)
        table.add_column(texts[0], justify="right" if right else "left", no_wrap=right, min_width=longest)
    for row in cells:
        table.add_row(*row)
    return table


def _paragraphs(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return the table with a name and a value on each line."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for row in rows:
        for column, text in zip(columns, row, strict=True):
            table.add_row(column.removesuffix(">"), text)
        table.add_row()
    return table


class _Console(Console):
    """A console that escapes control characters in texts from elsewhere.

    With them, such a text could command a terminal.
    """

    def render_str(self, text: str, **options: Any) -> Text:
        """See Console.render_str."""
        return super().render_str("\n".join(map(visible, text.split("\n"))), **options)


def stdout_console() -> Console:
    """Return the console for data.

    It is wide where stdout is no terminal.
    """
    return _Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False, markup=False)


def stderr_console() -> Console:
    """Return the console for messages to people."""
    return _Console(stderr=True, highlight=False, markup=False)


def warn(text: str) -> None:
    """Print a text for people as one line on stderr."""
    stderr_console().print(text, soft_wrap=True)


def say(*lines: str) -> None:
    """Print lines for people on stdout.

    Control characters in them are escaped, as in tables.
    """
    print(*map(visible, lines), sep="\n", flush=True)


def size(count: float) -> str:
    """Format a number of bytes in decimal units, such as "4.80 MB"."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= 0.9995 * scale:
            value = count / scale
            return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"
    return f"{count:.0f} B"


def percent(share: float | None) -> str:
    """Format a share from 0 to 1, such as "98.77 %".

    None is "-".
    """
    return "-" if share is None else f"{100 * share:.2f} %"


def quality(accuracy: float | None, loss: float | None) -> str:
    """Return the accuracy in words, or else the loss.

    The loss is returned if accuracy is not defined; empty if neither is known.
    """
    if accuracy is not None:
        return f"accuracy {percent(accuracy)}"
    return f"loss {number(loss)}" if loss is not None else ""


def number(value: float | None, digits: int = 3) -> str:
    """Format a number with `digits` digits after the point.

    None is "-".
    """
    return "-" if value is None else f"{value:.{digits}f}"


def duration(seconds: float) -> str:
    """Format seconds as "42 ms" or "5 h 1 min".

    Between these are forms such as "0.42 s" and "3 min 20 s".
    """
    if 0 < seconds < 0.1:
        return f"{1000 * seconds:.{0 if seconds >= 0.01 else 1}f} ms"
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _natural(table: dict[str, Any], descriptor: Any) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for field in descriptor.fields:  # a Descriptor, of the pure or of the compiled implementation
        value = table.get(field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            kind = field.message_type.fields_by_name["value"]
            result[field.name] = {key: _natural_value(item, kind) for key, item in (value or {}).items()}
        elif isinstance(value, list):
            result[field.name] = [_natural_value(item, field) for item in value]
        else:
            result[field.name] = None if value is None else _natural_value(value, field)
    return result


def _natural_value(value: Any, field: FieldDescriptor) -> Any:
    if field.message_type is not None:
        return _natural(value, field.message_type)
    if field.type in _INT64:
        return int(value)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return base64.b64decode(value).hex()
    return value
