"""A deployment on this host: its commands run as written, but in a temporary folder and on free ports."""

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.ports import free_port

PROGRAMS = Path(sys.executable).parent
SECONDS = 120.0
"""The longest wait for an event, in seconds."""

_HIDDEN = ("FEDRING_", "FLCTL_", "OTEL_", "NOTIFY_", "WATCHDOG_")
_WEB_PORT = re.compile(r"\bweb_port = (\d+)")
_ADDRESS = re.compile(r"\b(?P<host>0\.0\.0\.0|127\.0\.0\.1|[a-z][a-z0-9-]*):(?P<port>\d{4,5})\b")


class Translator:
    """Translates paths and ports of a deployment to this host; each machine or container has its own root folder."""

    def __init__(self) -> None:
        self._ports: dict[str, int] = {}

    def port(self, number: str) -> int:
        """Return the free port that replaces this one."""
        if number not in self._ports:
            self._ports[number] = free_port()
        return self._ports[number]

    def translate(self, text: str, paths: Mapping[str, Path], machine: str = "") -> str:
        """Return a text with translated paths and addresses.

        Args:
            text: a command or a configuration of the deployment.
            paths: folders of this host, by the prefix of the paths to replace.
            machine: the machine that uses the text; other machines have their own ports. A host name in an address is
                that of a machine.
        """

        def address(match: re.Match[str]) -> str:
            owner = machine if match["host"][0].isdigit() else match["host"]
            return f"127.0.0.1:{self.port(f'{owner}:' + match['port'])}"

        for path in sorted(paths, key=len, reverse=True):
            text = re.sub(rf"(?<![\w./-]){re.escape(path)}(?![\w-])", str(paths[path]), text)
        text = _WEB_PORT.sub(lambda match: f"web_port = {self.port(f'{machine}:{match[1]}')}", text)
        return _ADDRESS.sub(address, text)


class Running:
    """A running command, without this shell's settings; it is killed at the end of the `with` block."""

    def __init__(self, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        self.log = log
        given = {name: value for name, value in os.environ.items() if not name.startswith(_HIDDEN)}
        path = f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}"
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**given, "PATH": path, **(env or {})},
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        if self.process.stdout:
            self.process.stdout.close()

    def first_line(self) -> str:
        """Return the first line on stdout."""
        stdout = self.process.stdout
        assert stdout is not None
        deadline, data = time.monotonic() + SECONDS, b""
        while not data.endswith(b"\n"):
            ready = select.select([stdout], [], [], max(0.0, deadline - time.monotonic()))[0]
            byte = os.read(stdout.fileno(), 1) if ready else b""
            assert byte, f"no line came: {self.log.read_text()[-3000:]}"
            data += byte
        return data.decode()

    def end(self, number: int = signal.SIGTERM, seconds: float = SECONDS) -> int:
        """Send the signal; return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(seconds)


def run(command: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command that ends by itself; return the result."""
    given = {name: value for name, value in os.environ.items() if not name.startswith(_HIDDEN)}
    path = f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}"
    environment = {**given, "PATH": path, **(env or {})}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=SECONDS, check=False)
