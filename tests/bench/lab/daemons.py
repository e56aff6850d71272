"""What the benchmarks of daemons share: fleets that can import `tests`, and what their processes use."""

import contextlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedring.control.calls import Control
from fedring.ctl.fleet import Fleet
from fedring.ctl.local.runner import running_fleet
from fedring.rpc.tls import PLAINTEXT, Tls

ROOT = Path(__file__).parents[3]
TRUSTED = ["fedring", "tests.bench.lab.trainers"]


@contextlib.contextmanager
def fleet_of(
    clients: Sequence[Mapping[str, Any]], *, operator: Tls = PLAINTEXT, **server: Any
) -> Iterator[tuple[Fleet, Control]]:
    """Start a fleet whose daemons can import the modules of `tests`; its state is removed afterwards.

    Args:
        clients: Configuration keys of each client.
        operator: Certificates with which the control port is called.
        **server: Configuration keys of the server.
    """
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    with (
        tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as folder,
        running_fleet(
            Path(folder),
            {"trusted": TRUSTED, **server},
            [{"trusted": TRUSTED, **client} for client in clients],
            env={"PYTHONPATH": path},
            operator=operator,
        ) as (fleet, control),
    ):
        yield fleet, control


def peak_bytes(pid: int) -> int:
    """Return the peak resident memory of the process (VmHWM)."""
    return _status(pid, "VmHWM")


def resident_bytes(pid: int) -> int:
    """Return the resident memory of the process now (VmRSS)."""
    return _status(pid, "VmRSS")


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the processor seconds that the processes have used so far, in user and kernel mode."""
    return sum(_cpu_seconds(pid) for pid in pids)


def print_line(facts: Mapping[str, Any]) -> None:
    """Print one JSON line."""
    print(json.dumps(facts))


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _status(pid: int, key: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)
