"""The audit log: one JSON object a line, in a file that is rotated by size."""

import logging
import os
from logging.handlers import RotatingFileHandler
from pathlib import Path

from fedring.daemon.config import ConfigError
from fedring.daemon.logs import JsonFormatter

_FILE_BYTES = 4 << 20
_FILES = 5  # besides the one that is written


class AuditLog:
    """Keeps who did what, or was refused, and when. Its lines go only to the file."""

    def __init__(self, path: Path) -> None:
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600))
            self._handler = RotatingFileHandler(path, maxBytes=_FILE_BYTES, backupCount=_FILES, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from error
        self._handler.setFormatter(JsonFormatter())
        self._log = logging.getLogger("audit")
        self._log.setLevel(logging.INFO)
        self._log.propagate = False
        self._log.addHandler(self._handler)

    def write(self, *, identity: str, peer: str, verb: str, result: str) -> None:
        """Append a line."""
        facts = {"identity": identity, "peer": peer, "verb": verb, "result": result}
        self._log.info("%s", verb, extra=facts)

    def close(self) -> None:
        """Close the file."""
        self._log.removeHandler(self._handler)
        self._handler.close()
