"""Makes the process of a job's code a fork of fl-client, for clients that trust this module.

A new interpreter takes seconds to import torch. Only its start is not the real one here: the process has a session, a
process id, a connection and an end of its own. `test_code_processes.py` also has tests with a new interpreter.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace

from fedring.client.training import child, process


class ForkedCode:
    """A running fork, with the part of `subprocess.Popen`'s interface that fl-client uses."""

    def __init__(self, command: Sequence[str], *, pass_fds: Sequence[int], start_new_session: bool) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid:
            return
        try:
            if start_new_session:
                os.setsid()
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
                signal.signal(number, signal.SIG_DFL)
            kept = sorted({0, 1, 2, *pass_fds})
            for low, high in pairwise([*kept, os.sysconf("SC_OPEN_MAX")]):
                os.closerange(low + 1, high)
            sys.argv = list(command[2:])
            child.main()
        finally:
            os._exit(1)

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float = 60.0) -> int:
        """Return the exit code when it has ended.

        Raises:
            subprocess.TimeoutExpired: If it has not by then.
        """
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("the code of jobs", timeout)
            time.sleep(0.002)
        return code


setattr(process, "subprocess", SimpleNamespace(Popen=ForkedCode, TimeoutExpired=subprocess.TimeoutExpired))  # noqa: B010
