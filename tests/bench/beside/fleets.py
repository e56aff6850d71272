"""A run of one system, and what is measured around it: times, memory, bytes on the wire, and kills."""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedring.control.failure import Failure
from fedring.ctl.local.ranks import Host
from tests.bench.beside.work import accuracy
from tests.bench.lab.lines import Lines
from tests.bench.lab.networks import LIMITED
from tests.processes import lives, tree_of

_SAMPLE_SECONDS = 0.25
_MOST_SECONDS = 3600.0
_TRAINED_SECONDS = 1.0  # of the round in which somebody is killed
_MOST_HARM_SECONDS = 600.0  # until a round has ended after that


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


@dataclass(frozen=True, slots=True)
class Harm:
    """How a run has gone on after a kill."""

    seconds: float | None  # from the kill to the end of the next round; None = it did not go on
    updates: float | None  # that this round has


@dataclass(frozen=True, slots=True)
class Run:
    """A run that is under way.

    Attributes:
        launched: When the first process was started, by time.time().
        server: The process of the server.
        clients: Those of the clients.
        rounds: Returns the rounds so far: each with `began` and, later, `ended` by time.time(), and `train`, the
            seconds of its longest training, and `updates`, of how many clients it has them.
        over: Returns whether all rounds have ended.
        model: Returns the last model, by name.
        restart: Starts the server again, with the state that it had.
        others: Further processes that live until all rounds have ended.
    """

    launched: float
    server: int
    clients: Sequence[int]
    rounds: Callable[[], Sequence[Mapping[str, float]]]
    over: Callable[[], bool]
    model: Callable[[], dict[str, Any]]
    restart: Callable[[], object]
    others: Sequence[int] = ()


System = Callable[[Task], AbstractContextManager[Run]]


def measure(system: System, task: Task) -> Outcome:
    """Run a task to its end."""
    with system(task) as run:
        with watch(task, run) as watched:
            wait_for(task, run.over, pids=[run.server, *run.clients, *run.others])
        rounds = run.rounds()
        right = accuracy(run.model(), task.root) if task.cell == "mnist" else None
    one, *others = rounds
    return Outcome(
        one["ended"] - run.launched - one["train"],
        [each["ended"] - each["began"] - each["train"] for each in others],
        [each["train"] for each in rounds],
        watched.wire / len(rounds) if watched.wire is not None else None,
        watched.server,
        watched.client,
        right,
    )


def harm(system: System, task: Task, whom: str) -> Harm:
    """Kill a client or the server with SIGKILL in the last round but one, and see how it goes on.

    Args:
        system: Which runs the task.
        task: With at least two rounds.
        whom: "client", which stays away, or "server", which is started again at once.
    """
    with system(task) as run:
        wait_for(task, lambda: len(run.rounds()) == task.rounds - 1 and "ended" not in run.rounds()[-1])
        time.sleep(_TRAINED_SECONDS)
        killed = time.time()
        kill_tree(run.clients[-1] if whom == "client" else run.server)
        if whom == "server":
            run.restart()

        def went_on() -> bool:
            return any(each.get("ended", 0.0) > killed for each in run.rounds())

        try:
            wait_for(task, went_on, seconds=_MOST_HARM_SECONDS)
        except Failure:
            return Harm(None, None)
        first = next(each for each in run.rounds() if each.get("ended", 0.0) > killed)
        return Harm(first["ended"] - killed, first["updates"])


@dataclass
class Watched:
    """What has been seen of the processes so far."""

    server: int = 0
    client: int = 0  # of the largest one
    wire: float | None = None  # of one client, on the average


@contextmanager
def watch(task: Task, run: Run) -> Iterator[Watched]:
    """Watch the memory of the trees below the processes, and count the bytes of the clients' lines at the end."""
    watched, over = Watched(), threading.Event()

    def look() -> None:
        while not over.wait(_SAMPLE_SECONDS):
            watched.server = max(watched.server, _tree_bytes(run.server))
            watched.client = max(watched.client, *map(_tree_bytes, run.clients))

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
        all_of_them = [each for process in started for each in tree_of(process.pid)]  # some have sessions of their own
        for process in started:
            process.terminate()
        with suppress(subprocess.TimeoutExpired):
            for process in started:
                process.wait(5.0)
        for pid in {each for process in started for each in tree_of(process.pid)} | set(all_of_them):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in started:
            process.wait()


def wait_for(task: Task, done: Callable[[], bool], *, pids: Sequence[int] = (), seconds: float = _MOST_SECONDS) -> None:
    """Wait until something is done.

    Raises:
        Failure: It takes too long, or one of the processes has ended. The sentence has the last lines of the logs.
    """
    end = time.monotonic() + seconds
    while not done():
        ended = [pid for pid in pids if not lives(pid)]
        if (ended and not done()) or time.monotonic() > end:
            tails = [f"{log.name}: {log.read_text(errors='replace')[-1500:]}" for log in task.folder.glob("*.log")]
            raise Failure("the run of a peer did not end well:\n" + "\n".join(tails))
        time.sleep(0.1)


def kill_tree(pid: int) -> None:
    """Kill a process and all that it has started."""
    for each in reversed(tree_of(pid)):
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def _tree_bytes(pid: int) -> int:
    """Return the memory of a process and all that it has started; pages that they share count once."""
    total = 0
    for each in tree_of(pid):
        with suppress(OSError):
            rollup = Path(f"/proc/{each}/smaps_rollup").read_text()
            total += sum(int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Pss:"))
    return total


def _line_bytes(host: Host) -> int:
    """Return how many bytes have gone over a host's line, in both directions, with all headers."""
    command = ["ip", "-n", host.prefix[-1], "-j", "-s", "link", "show", "eth0"]
    told = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)[0]["stats64"]
    return int(told["rx"]["bytes"]) + int(told["tx"]["bytes"])
