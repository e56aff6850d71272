"""A daemon as a child process that can be restarted.

It can also be sent signals, and is stopped for certain.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from fedring.control.failure import Failure
from fedring.ctl.with_code import MODULE

_TAIL_LINES = 12


class Process:
    """The child process `python -m module key=value ...`.

    Its starter ends it with stop_all.

    Args:
        name: What messages call it.
        module: The module to run.
        settings: Configuration keys, which become the command line.
        log: File for its stderr; a further start appends to it.
    """

    def __init__(self, name: str, module: str, settings: Mapping[str, Any], log: Path) -> None:
        self.name = name
        self.module = module
        self.settings = dict(settings)
        self.log = log
        self.env: dict[str, str] = {}
        """Further variables of the next start. The child also inherits variables that do not begin with FEDRING_."""
        self.prefix: Sequence[str] = ()
        """Words before the command of the next start, such as those that run it in another network."""
        self.flags: list[str] = []
        """Further flags of the next start, before the settings."""
        self._child: subprocess.Popen[bytes] | None = None

    def find_code_in(self, folders: Sequence[Path]) -> None:
        """Let the next start find modules in these folders, after all others.

        The current folder is none of them, unless it is given.
        """
        self.flags = [os.pathsep.join(map(str, folders)), self.module, *self.flags]
        self.module = MODULE
        self.env["PYTHONSAFEPATH"] = "1"

    @property
    def pid(self) -> int:
        """The id of the newest started process; it may have ended."""
        return self._started.pid

    def start(self) -> None:
        """Start the process, in a session of its own.

        Ctrl-C in the terminal reaches its parent only, then.
        """
        self.close()
        with self.log.open("ab") as log, _signals_deferred():
            self._child = self.launch(log)

    def launch(self, log: IO[bytes]) -> "subprocess.Popen[bytes]":
        """Start the program with its errors in `log`, and return the child."""
        return subprocess.Popen(
            [*self.prefix, sys.executable, "-m", self.module, *self.arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            env=self.environment,
            start_new_session=True,
        )

    @property
    def arguments(self) -> list[str]:
        """The command line of the next start."""
        return [*self.flags, *overrides(self.settings)]

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables of the next start."""
        return {**_plain_environment(), **self.env}

    def first_line(self, timeout_seconds: float) -> str:
        """Wait for the first line on stdout, and return it.

        Raises:
            Failure: The process ended, or printed no line in time. The sentence has the end of the log.
        """
        stdout = self._started.stdout
        if stdout is None:
            raise ValueError(f"stdout of {self.name} is no pipe")
        deadline = time.monotonic() + timeout_seconds
        data = b""
        while not data.endswith(b"\n"):
            ready, _, _ = select.select([stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise Failure(f"{self.name} was not ready within {timeout_seconds:g} s:\n{self.tail()}")
            if not (byte := os.read(stdout.fileno(), 1)):
                self.wait(timeout_seconds)
                raise self.failure()
            data += byte
        return data.decode().strip()

    @property
    def running(self) -> bool:
        """Whether the process was started and has not ended."""
        return self._child is not None and self._child.poll() is None

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        return self._started.poll()

    def wait(self, timeout_seconds: float | None = None) -> int:
        """Wait until the process has ended, and return its exit code.

        Raises:
            TimeoutError: It still runs after `timeout_seconds`.
        """
        try:
            return self._started.wait(timeout_seconds)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"{self.name} still runs after {timeout_seconds:g} s") from error

    def send(self, number: int) -> None:
        """Send the signal, if the process still runs."""
        self._started.send_signal(number)

    def kill(self) -> None:
        """Kill the process and its children, and wait until it has ended."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self.wait()

    def close(self) -> None:
        """Close the pipe of a process that has ended."""
        if self._child is not None and self._child.stdout is not None:
            self._child.stdout.close()

    def failure(self) -> Failure:
        """Return a Failure about the process' end, with its log's end."""
        code = self.poll()
        how = f"with exit code {code}" if code is None or code >= 0 else f"by signal {-code}"
        return Failure(f"{self.name} ended {how}; the end of {self.log}:\n{self.tail()}")

    def tail(self, lines: int = _TAIL_LINES) -> str:
        """Return the last lines of the log.

        JSON records are shown as plain text.
        """
        try:
            text = self.log.read_text(encoding="utf-8", errors="replace")
        except OSError:
            text = ""
        return "\n".join(f"  {_readable(line)}" for line in text.splitlines()[-lines:]) or "  (it is empty)"

    @property
    def _started(self) -> subprocess.Popen[bytes]:
        if self._child is None:
            raise ValueError(f"{self.name} was never started: call start first")
        return self._child


def stop_all(processes: Sequence[Process], timeout_seconds: float) -> None:
    """Send SIGTERM to all processes, and kill the late ones.

    Late are those that have not ended within `timeout_seconds`. A second Ctrl-C kills them at once.
    """
    try:
        running = [process for process in processes if process.running]
        for process in running:
            process.send(signal.SIGTERM)
        deadline = time.monotonic() + timeout_seconds
        with contextlib.suppress(TimeoutError):
            for process in running:
                process.wait(max(0.0, deadline - time.monotonic()))
    finally:
        for process in processes:
            process.kill()
            process.close()


def overrides(settings: Mapping[str, Any]) -> list[str]:
    """Return the settings as `key=value` arguments of a daemon, with JSON values."""
    return [f"{key}={json.dumps(value, default=str)}" for key, value in settings.items()]


def _plain_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("FEDRING_")}


def _readable(line: str) -> str:
    """Return the level and the text of a JSON record.

    Any other line is returned as it is.
    """
    try:
        record = json.loads(line)
        error = str(record.get("error", "")).strip().rpartition("\n")[2]
        return f"{record['level']}: {record['text']}" + (f" ({error})" if error else "")
    except (ValueError, KeyError, TypeError, AttributeError):
        return line


@contextlib.contextmanager
def _signals_deferred() -> Iterator[None]:
    """Defer SIGINT and SIGTERM to the end of the block.

    So a child that was started is also remembered.
    """
    received: list[int] = []
    try:
        old = {n: signal.signal(n, lambda number, _: received.append(number)) for n in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: it gets no signals
        old = {}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler or signal.SIG_DFL)
        for signal_number in received:
            signal.raise_signal(signal_number)
