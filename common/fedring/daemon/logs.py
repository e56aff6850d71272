"""Logs: text on a terminal, one JSON object a line elsewhere."""

import json
import logging
import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Literal

_PLAIN = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

_OWN = _PLAIN | {"at", "level", "logger", "text", "error"}
"""The names that a record, or its line of JSON, has already."""

_of_task: ContextVar[Mapping[str, object]] = ContextVar("ids", default=MappingProxyType({}))


class JsonFormatter(logging.Formatter):
    """Writes each record and its `extra` as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        row = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "text": record.getMessage(),
            **{key: value for key, value in vars(record).items() if key not in _PLAIN},
        }
        if record.exc_info:
            row["error"] = self.formatException(record.exc_info)
        return json.dumps(row, default=str)


class TextFormatter(logging.Formatter):
    """Writes each record as one line of visible characters.

    This holds whatever text from elsewhere the record quotes.
    """

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname).1s %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line without a traceback."""
        return visible(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        """Return the lines of a traceback, indented.

        The text of an error may hold lines that look like records.
        """
        return "\n".join(f"  {visible(line)}" for line in super().formatException(ei).split("\n"))


def visible(text: str) -> str:
    """Return a text with escapes for unprintable characters.

    Line ends and ESC are among them.
    """
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


class _Ids(logging.Filter):
    """Adds to each record those ids that its caller has not given."""

    def __init__(self, source: Callable[[], Mapping[str, object]]) -> None:
        super().__init__()
        self._source = source

    def filter(self, record: logging.LogRecord) -> bool:
        for key, value in self._source().items():
            if not getattr(record, key, None):
                setattr(record, key, value)
        return True


def set_up_logs(style: Literal["auto", "text", "json"] = "auto", level: str = "info") -> None:
    """Send every record to stderr in the wanted style."""
    handler = logging.StreamHandler(sys.stderr)
    if style == "json" or (style == "auto" and not sys.stderr.isatty()):
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(TextFormatter())
    handler.addFilter(_Ids(_of_task.get))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def loggable(figures: Mapping[str, object]) -> dict[str, object]:
    """Return figures for a record's `extra`, named by somebody's code.

    Those with a name that a record has already are left out, since Python refuses them.
    """
    return {name: value for name, value in figures.items() if name not in _OWN}


def log_with(**ids: object) -> None:
    """Add the ids to every record of this task from now on."""
    _of_task.set({**_of_task.get(), **ids})


def log_always(ids: Callable[[], Mapping[str, object]]) -> None:
    """Add the current ids to every record of this process.

    Args:
        ids: Called for each record; returns the ids.
    """
    for handler in logging.getLogger().handlers:
        handler.addFilter(_Ids(ids))
