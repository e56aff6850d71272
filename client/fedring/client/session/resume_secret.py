"""The secret that gives a client its session back, in the file `resume_secret` of its state folder."""

import logging
import os
from pathlib import Path

from fedring.rpc.contract import RESUME_SECRET

log = logging.getLogger(__name__)

_MOST_BYTES = 64  # that are read: a whole file has fewer


class ResumeSecret:
    """What the server gave this client last, to be shown when it joins again.

    The file is readable by its owner alone. Its text and a line's end are written to another file, which then takes its
    place, so that a kill at any moment leaves the old secret or the new one. After a power loss there may be none: that
    costs a wait for the old session's end.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "resume_secret"
        self.text = self._stored = self._read()  # empty = none

    def keep(self, text: str) -> None:
        """Show `text` from now on, also after a restart; anything that is no secret changes nothing."""
        if not RESUME_SECRET.fullmatch(text):
            return
        self.text = text
        if text == self._stored:
            return
        new = self._file.with_name("resume_secret.new")
        try:
            new.unlink(missing_ok=True)  # a kill may have left it
            with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
                file.write(f"{text}\n")
            new.replace(self._file)
        except OSError as error:
            log.warning("%s cannot be written, so that a restarted client may have to wait: %s", self._file, error)
            return
        self._stored = text

    def _read(self) -> str:
        """Return the secret in the file; empty if there is none, or what there is cannot be read or is damaged."""
        try:
            with self._file.open("rb") as file:
                text = file.read(_MOST_BYTES).decode(errors="replace").removesuffix("\n")
        except FileNotFoundError:
            return ""
        except OSError as error:
            log.warning("%s cannot be read: %s", self._file, error)
            return ""
        return text if RESUME_SECRET.fullmatch(text) else ""
