"""What a run of one system is given, and what is measured around it: memory and bytes on the wire."""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedring.control.failure import Failure
from fedring.ctl.local.ranks import Host
from tests.bench.lab.lines import Lines
from tests.bench.lab.networks import LIMITED

_SAMPLE_SECONDS = 0.25
_MOST_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Task:
    """One run: what each client does, where, and how often."""

    cell: str  # see work.py
    clients: int
    rounds: int
    root: str  # folder of MNIST
    folder: Path  # an empty one, which is removed afterwards
    lines: Lines

    @property
    def server(self) -> Host:
        """Where the server runs."""
        return self.lines.network.hosts[0]

    @property
    def hosts(self) -> Sequence[Host]:
        """Where the clients run."""
        return self.lines.network.hosts[1:]

    @property
    def apart(self) -> bool:
        """Whether each client has a network of its own."""
        return self.lines.network.limit == LIMITED

    @property
    def address(self) -> str:
        """The server's address for clients."""
        return self.server.env["FEDRING_RING_LISTEN"].rpartition(":")[0] if self.apart else "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run took."""

    first: float  # seconds from the start of the first process to the first model, without its training
    beyond: Sequence[float]  # seconds of each further round beyond its longest training
    train: Sequence[float]  # seconds of the longest training of each round
    wire: float | None  # bytes to and from a client in a round, with all that comes before; None without root
    server: int  # most bytes of memory of the server's processes
    client: int  # of one client's processes
    accuracy: float | None = None


def outcome(
    rounds: Sequence[Mapping[str, Any]], launched: float, watched: "Watched", accuracy: float | None
) -> Outcome:
    """Return the outcome of a run.

    Args:
        rounds: Each with `began` and `ended` by time.time(), and `train`, its longest training.
        launched: When the first process was started, by time.time().
        watched: Memory and bytes.
        accuracy: Of the last model.
    """
    one, *others = rounds
    return Outcome(
        one["ended"] - launched - one["train"],
        [each["ended"] - each["began"] - each["train"] for each in others],
        [each["train"] for each in rounds],
        watched.wire / len(rounds) if watched.wire is not None else None,
        watched.server,
        max(watched.clients),
        accuracy,
    )


@dataclass
class Watched:
    """What has been seen of the processes so far."""

    server: int = 0
    clients: list[int] = field(default_factory=list)
    wire: float | None = None  # of one client, on the average


@contextmanager
def watch(task: Task, server: Sequence[int], clients: Sequence[Sequence[int]]) -> Iterator[Watched]:
    """Watch the memory of the trees below these processes, and count the bytes of the clients' lines at the end."""
    watched, over = Watched(clients=[0] * len(clients)), threading.Event()

    def look() -> None:
        while not over.wait(_SAMPLE_SECONDS):
            watched.server = max(watched.server, sum(map(_tree_bytes, server)))
            watched.clients = [
                max(most, sum(map(_tree_bytes, pids))) for most, pids in zip(watched.clients, clients, strict=True)
            ]

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    try:
        yield watched
    finally:
        over.set()
        looking.join()
        if task.apart:
            watched.wire = sum(_line_bytes(host) for host in task.hosts) / task.clients


@contextmanager
def processes(task: Task) -> Iterator[Callable[..., int]]:
    """Give a function that starts a command on a host and returns its process id; all are ended afterwards.

    The function takes a host, the command, and further variables. Each process has a log in the task's folder.
    """
    started: list[subprocess.Popen[bytes]] = []

    def start(host: Host, command: Sequence[str], **variables: str) -> int:
        log = task.folder / f"{len(started)}.log"
        env = {**os.environ, **host.env, **variables, "OMP_NUM_THREADS": "1"}
        with log.open("wb") as out:
            started.append(
                subprocess.Popen(
                    [*host.prefix, *command], env=env, stdout=out, stderr=out, cwd=task.folder, start_new_session=True
                )
            )
        return started[-1].pid

    try:
        yield start
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in started:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                for process in started:
                    process.wait(5.0)


def wait_for(task: Task, done: Callable[[], bool], *, pids: Sequence[int] = ()) -> None:
    """Wait until something is done.

    Raises:
        Failure: It takes too long, or one of the processes has ended. The sentence has the last lines of the logs.
    """
    end = time.monotonic() + _MOST_SECONDS
    while not done():
        ended = [pid for pid in pids if not _runs(pid)]
        if ended or time.monotonic() > end:
            tails = [f"{log.name}: {log.read_text(errors='replace')[-1500:]}" for log in task.folder.glob("*.log")]
            raise Failure("the run of a peer did not end well:\n" + "\n".join(tails))
        time.sleep(0.1)


def read_rounds(folder: Path) -> list[dict[str, Any]]:
    """Return the rounds that a peer has written down."""
    rounds: list[dict[str, Any]] = json.loads((folder / "rounds.json").read_text())
    return rounds


def _runs(pid: int) -> bool:
    with suppress(OSError):
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    return False


def _tree_bytes(pid: int) -> int:
    """Return the memory of a process and all that it has started; pages that they share count once."""
    total = 0
    with suppress(OSError):  # it has ended
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        total = sum(int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Pss:"))
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            total += sum(_tree_bytes(int(child)) for child in children.read_text().split())
    return total


def _line_bytes(host: Host) -> int:
    """Return how many bytes have gone over a host's line, in both directions, with all headers."""
    command = ["ip", "-n", host.prefix[-1], "-j", "-s", "link", "show", "eth0"]
    told = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)[0]["stats64"]
    return int(told["rx"]["bytes"]) + int(told["tx"]["bytes"])
