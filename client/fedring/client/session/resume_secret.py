"""The secret with which a client takes back its session.

It is the file `resume_secret` in the client's state folder.
"""

import logging
import os
from pathlib import Path

from fedring.rpc.contract import RESUME_SECRET

log = logging.getLogger(__name__)

_MOST_BYTES = 64  # how much of the file is read; a valid one is shorter


class ResumeSecret:
    """The newest resume secret from the server, kept on disk.

    The client shows it in the next Join. Only the file's owner can read it. A new secret is written to another file,
    which then replaces the old one, so that a kill at any moment leaves the old secret or the new one. After a power
    loss there may be none; then the client waits until its old session has ended.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "resume_secret"
        self.text = self._stored = self._read()  # empty = none

    def keep(self, text: str) -> None:
        """Show `text` in each later Join, also after a restart.

        Text that is no secret changes nothing. If the file cannot be written, a warning is logged.
        """
        if not RESUME_SECRET.fullmatch(text):
            return
        self.text = text
        if text == self._stored:
            return
        new = self._file.with_name("resume_secret.new")
        try:
            new.unlink(missing_ok=True)  # A kill may have left it.
            with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
                file.write(f"{text}\n")
            new.replace(self._file)
        except OSError as error:
            log.warning("%s cannot be written, so this client may have to wait when it restarts: %s", self._file, error)
            return
        self._stored = text

    def _read(self) -> str:
        """Return the secret in the file, or an empty string.

        It is empty if there is no file, or if it cannot be read or is damaged.
        """
        try:
            with self._file.open("rb") as file:
                text = file.read(_MOST_BYTES).decode(errors="replace").removesuffix("\n")
        except FileNotFoundError:
            return ""
        except OSError as error:
            log.warning("%s cannot be read: %s", self._file, error)
            return ""
        return text if RESUME_SECRET.fullmatch(text) else ""
