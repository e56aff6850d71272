"""Restarts fl-client on SIGUSR2, to import the job's code again.

A process imports a module once. To import it again in place would leave objects of the old code behind, in every module
that had taken them over, so the whole process begins anew, under the same process id and with the same arguments. Only
someone who may sign in to the client's host can cause this. A server cannot.
"""

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

log = logging.getLogger(__name__)

_CHECK_SECONDS = 300.0


class Restart:
    """The restart that somebody has asked for; owned by `main`.

    Args:
        close: Ends the wait for the next round. Any thread may call it.
        folder: The directory of the start, where its arguments count: the code of a job may have changed it.

    Attributes:
        wanted: Whether the process is to begin anew once it has left its current round.
    """

    def __init__(self, close: Callable[[], None], folder: Path) -> None:
        self.wanted = False
        self._close, self._folder = close, folder
        self._training = self._cancelled = False
        self._check: threading.Thread | None = None

    def ask(self, number: int, frame: FrameType | None) -> None:
        """Check that fl-client could start, and restart it then.

        This is the signal's handler.
        """
        if self._check is None or not self._check.is_alive():
            self._check = threading.Thread(target=self._check_first, name="restart", daemon=True)
            self._check.start()

    def cancel(self) -> None:
        """Do not begin anew: fl-client was told to stop."""
        self.wanted, self._cancelled = False, True

    @contextmanager
    def after_training(self) -> Iterator[None]:
        """Let a restart wait until this context ends."""
        self._training = True
        try:
            yield
        finally:
            self._training = False

    def now(self) -> None:
        """Begin anew. This returns only by an OSError."""
        log.info("restarting, to import the code as it is now")
        signal.signal(
            signal.SIGUSR2, signal.SIG_IGN
        )  # This outlives exec: a signal that comes too early must not kill.
        os.chdir(self._folder)
        os.execv(sys.executable, _command())

    def _check_first(self) -> None:
        """Try the start in another process.

        Code that does not work must not end a client that does.
        """
        try:
            done = subprocess.run(
                [*_command(), "--check-config"],
                cwd=self._folder,
                capture_output=True,
                text=True,
                timeout=_CHECK_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return log.error("not restarted: %s", error)
        if done.returncode:
            return log.error("not restarted, since fl-client could not start again: %s", done.stderr.strip()[-1000:])
        if not self._cancelled:
            self.wanted = True
            if not self._training:
                self._close()


def _command() -> list[str]:
    return [sys.executable, *sys.orig_argv[1:]]
