"""What the daemon benchmarks share: a fleet, a job, and what its processes used."""

import contextlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedring.ctl.bench.experiment import ended_by_signals
from fedring.ctl.control import Control
from fedring.ctl.fleet import Fleet
from fedring.v1 import control_pb2 as pb

ROOT = Path(__file__).parent.parent.parent
TRUSTED = ["fedring", "torchvision", "tests"]


@contextlib.contextmanager
def fleet_of(clients: Sequence[Mapping[str, Any]], **server: Any) -> Iterator[tuple[Fleet, Control]]:
    """A running fleet whose daemons can import this folder's modules; its state is gone afterwards."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    with (
        ended_by_signals(),
        tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as folder,
        Fleet(
            Path(folder),
            {"trusted": TRUSTED, **server},
            [{"trusted": TRUSTED, **client} for client in clients],
            env={"PYTHONPATH": path},
        ) as fleet,
        Control(fleet.control) as control,
    ):
        yield fleet, control


def run_job(control: Control, job: Mapping[str, Any]) -> list[pb.Round]:
    """The job's rounds, oldest first; RuntimeError unless it completed."""
    events = control.events()
    job_id = control.start_job(job).job_id
    for _ in control.follow_job(job_id, events):
        pass
    if (ended := control.job(job_id)).state != "completed":
        raise RuntimeError(f"the job {ended.state}: {ended.reason}")
    return sorted(control.rounds(job_id=job_id, limit=ended.rounds), key=lambda round_: round_.round)


def peak_bytes(pid: int) -> int:
    """The process' peak resident memory (VmHWM)."""
    return _status(pid, "VmHWM")


def resident_bytes(pid: int) -> int:
    """The process' resident memory now (VmRSS)."""
    return _status(pid, "VmRSS")


def cpu_seconds(pids: Iterable[int]) -> float:
    """Processor seconds that the processes have used so far, the kernel's work for them included."""
    return sum(_cpu_seconds(pid) for pid in pids)


def print_line(facts: Mapping[str, Any]) -> None:
    """One JSON line."""
    print(json.dumps(facts))


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _status(pid: int, key: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)
