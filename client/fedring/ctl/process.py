"""A daemon as a child process that can be started again, told to stop, and never outlives its parent's will."""

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

from fedring.ctl.failure import Failure

_TAIL_LINES = 12


class Process:
    """`python -m module key=value ...`, logging to the file `log`."""

    def __init__(self, name: str, module: str, settings: Mapping[str, Any], log: Path) -> None:
        self.name = name
        self.module = module
        self.settings = dict(settings)
        self.log = log
        self.env: dict[str, str] = {}
        """Variables of the next start, besides those of this process that do not configure fedring."""
        self.flags: list[str] = []
        """Flags of the next start, besides the settings."""
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The id of the process that was started last."""
        return self._started.pid

    def start(self) -> None:
        """The process runs, in a session of its own: a Ctrl-C at the terminal reaches only its parent."""
        self.close()
        with self.log.open("ab") as log, _signals_later():
            self._child = self.launch(log)

    def launch(self, log: IO[bytes]) -> "subprocess.Popen[bytes]":
        """Start the program with its errors in `log`, and return the child."""
        return subprocess.Popen(
            [sys.executable, "-m", self.module, *self.arguments],
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
        """The variables that the next start gets."""
        return {**_plain_environment(), **self.env}

    def first_line(self, timeout_seconds: float) -> str:
        """The first line on stdout; Failure with the end of the log if none comes in time."""
        stdout = self._started.stdout
        if stdout is None:
            raise ValueError("stdout is no pipe")
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
        """Whether it was started and has not ended."""
        return self._child is not None and self._child.poll() is None

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        return self._started.poll()

    def wait(self, timeout_seconds: float | None = None) -> int:
        """The exit code, once it has ended; TimeoutError if it has not by then."""
        try:
            return self._started.wait(timeout_seconds)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"{self.name} still runs after {timeout_seconds:g} s") from error

    def send(self, number: int) -> None:
        """The process has got the signal, if it still runs."""
        self._started.send_signal(number)

    def kill(self) -> None:
        """The process and its children are gone."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self.wait()

    def close(self) -> None:
        """The pipe of an ended process is closed."""
        if self._child is not None and self._child.stdout is not None:
            self._child.stdout.close()

    def failure(self) -> Failure:
        """That it ended when it should not have, and its last words."""
        code = self.poll()
        how = f"with exit code {code}" if code is None or code >= 0 else f"by signal {-code}"
        return Failure(f"{self.name} ended {how}; the end of {self.log}:\n{self.tail()}")

    def tail(self, lines: int = _TAIL_LINES) -> str:
        """The last lines of the log, as text."""
        try:
            text = self.log.read_text(encoding="utf-8", errors="replace")
        except OSError:
            text = ""
        return "\n".join(f"  {_readable(line)}" for line in text.splitlines()[-lines:]) or "  (it is empty)"

    @property
    def _started(self) -> subprocess.Popen[bytes]:
        if self._child is None:
            raise ValueError(f"{self.name} was never started")
        return self._child


def stop_all(processes: Sequence[Process], timeout_seconds: float) -> None:
    """Every one that runs was told to stop, and killed if it had not ended in time, or at a second Ctrl-C."""
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
    """The `key=value` arguments of a daemon that say the same."""
    return [f"{key}={json.dumps(value, default=str)}" for key, value in settings.items()]


def _plain_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("FEDRING_")}


def _readable(line: str) -> str:
    """A line of a log; a JSON record as its level and text."""
    try:
        record = json.loads(line)
        error = str(record.get("error", "")).strip().rpartition("\n")[2]
        return f"{record['level']}: {record['text']}" + (f" ({error})" if error else "")
    except (ValueError, KeyError, TypeError, AttributeError):
        return line


@contextlib.contextmanager
def _signals_later() -> Iterator[None]:
    """SIGINT and SIGTERM that come within take effect after it, so that no child is started and forgotten."""
    came: list[int] = []
    try:
        old = {n: signal.signal(n, lambda number, _: came.append(number)) for n in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread, which gets no signals
        old = {}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler or signal.SIG_DFL)
        for signal_ in came:
            signal.raise_signal(signal_)
