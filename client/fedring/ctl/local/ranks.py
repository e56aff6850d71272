"""Measurements by a group of processes, one for each rank.

A function runs in each process, and rank 0 returns the result. `fedring.ctl.local.rank` is what runs in each process.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from fedring.control.failure import Failure
from fedring.ctl.local.runner import ended_by_signals

Advance = Callable[[float], None]  # takes the share of a measurement that is done, from 0 to 1

_PROGRAM = "from fedring.ctl.local.rank import main; main()"
_TAIL_LINES = 12  # of a rank that failed


@dataclass(frozen=True, slots=True)
class Host:
    """A place to run a process.

    It is this machine, or a network namespace on it.
    """

    prefix: tuple[str, ...] = ()  # words before a command that make it run here
    env: Mapping[str, str] = field(default_factory=dict)  # further variables of a process here

    def start(self, command: Sequence[str], **options: object) -> subprocess.Popen[bytes]:
        """Start the command on this host.

        Options are those of subprocess.Popen, without env.
        """
        env = {**os.environ, **self.env}
        return subprocess.Popen([*self.prefix, *command], env=env, **options)  # type: ignore[call-overload,no-any-return]


def run_ranks(
    task: str, settings: Mapping[str, Any], hosts: Sequence[Host], *, advance: Advance = lambda share: None
) -> Any:
    """Run a function once on each host, and return rank 0's result.

    Args:
        task: The function, as module:name. It takes a `fedring.ctl.local.rank.Rank`, and `settings` as its keyword
            arguments.
        settings: What JSON can hold; equal on all ranks.
        hosts: Where the ranks run, in their order.
        advance: Called with what rank 0 reports of its progress.

    Raises:
        Failure: A rank failed. The sentence has the last lines of its errors. The other ranks are killed.
        OSError: The program of a host's prefix cannot be run.
    """
    ranks: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="fedring-bench-") as name, ended_by_signals():
        folder = Path(name)
        arguments = [task, json.dumps(settings), str(len(hosts)), str(folder / "store")]
        try:
            for rank, host in enumerate(hosts):
                command = [sys.executable, "-c", _PROGRAM, str(rank), *arguments]
                with (folder / f"{rank}.out").open("wb") as data, (folder / f"{rank}.err").open("wb") as errors:
                    ranks.append(host.start(command, stdout=data, stderr=errors))
            with (folder / "0.out").open("rb") as reports:
                return _follow(ranks, folder, reports, advance)
        finally:
            for process in ranks:
                process.kill()
                process.wait()


def _follow(ranks: Sequence[subprocess.Popen[bytes]], folder: Path, reports: IO[bytes], advance: Advance) -> Any:
    """Pass on rank 0's reports until all ranks have ended.

    Returns:
        Its result.
    """
    result: Any = None
    partial = b""
    while True:
        running = any(process.poll() is None for process in ranks)  # before reading: what they wrote is all there then
        *lines, partial = (partial + reports.read()).split(b"\n")
        for line in lines:
            report = json.loads(line)
            if "done" in report:
                advance(report["done"])
            else:
                result = report["result"]
        if failed := [rank for rank, process in enumerate(ranks) if process.poll()]:
            raise _failure(failed[0], folder)
        if not running:
            return result
        time.sleep(0.05)


def _failure(rank: int, folder: Path) -> Failure:
    lines = (folder / f"{rank}.err").read_text(encoding="utf-8", errors="replace").splitlines()
    return Failure(f"worker {rank} failed:\n" + "\n".join(f"  {line}" for line in lines[-_TAIL_LINES:]))
