"""One case's fleet: a server and clients, each on a line of its own, that can be harmed and brought back."""

import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random
from typing import Any

import grpc

from fedring.control.failure import Failure, Unreachable
from fedring.ctl.process import Process
from tests.campaign import layer
from tests.campaign.layer import Page
from tests.campaign.lessons import CLIENT, NOTES
from tests.campaign.line import Line
from tests.conftest import ROOT
from tests.fault.faulty_fleet import FaultyFleet, wait_for
from tests.fleets import Control, give_secrets
from tests.waiting import until

SECRET = bytes(range(32))
"""From which the clients' secrets follow, here and in the undisturbed twin."""
KILLED = 137  # how a process ends at a crash point
_REACHED = 4.0  # seconds in which a daemon comes to its crash point, or is killed where it is
_TRUSTED = {
    "trusted": ["fedring", "tests.campaign.lessons", "tests.fault.user_trainers", "tests.fault.signalled_models"]
}
_KEEP_ALL = {"keep_models": 100_000, "keep_update_rounds": 100_000, "keep_rounds": 100_000}
_DISK_BYTES = 600 << 20


class Scene(FaultyFleet):
    """A fleet that keeps all models and updates, and knows how to harm itself.

    Attributes:
        done: how often each harm was done, and to whom: "kill -9 of client-1".
        copies: saved states of the server, as (way, folder).
        lost: states of the server that were replaced by a copy.
        pages: by a daemon's name, how its operating system treats it; there is none without a layer.
        clock: the jumps of the server's clock: when, and by how many seconds it is ahead since.
        must_drop: the numbers of clients whose folders were put back while the server has forgotten their updates.
        damaged: the numbers of clients in whose folders a bit was flipped.
        originals: what blobs contained before a bit of them was flipped, by name.
        down_seconds: in which the server did not run, though it was started before.
    """

    def __init__(self, folder: Path, clients: int, settings: dict[str, Any], client: dict[str, Any]) -> None:
        self.done: Counter[str] = Counter()
        self.copies: list[tuple[str, Path]] = []
        self.lost: list[Path] = []
        self.lines: list[Line] = []
        self.originals: dict[str, bytes] = {}
        self.pages: dict[str, Page] = {}
        self.clock = [(time.time(), 0)]
        self.must_drop: list[int] = []
        self.damaged: set[int] = set()
        self.disk: Path | None = None
        self.down_seconds = 0.0
        self._killed_at: float | None = None
        self._stack = ExitStack()
        client = {**_TRUSTED, "threads": 1, **client}
        env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        super().__init__(folder, {**_TRUSTED, **_KEEP_ALL, **settings}, [client] * clients, env=env)
        give_secrets(folder, clients, SECRET)
        self.state = Path(self.server.settings["state_dir"])
        self.folders = [Path(each.settings["state_dir"]) for each in self.clients]
        for number, each in enumerate(self.clients):
            notes = self.folders[number].with_name(f"{each.name}.notes")
            each.env |= {
                CLIENT: str(number),
                NOTES: str(notes),
                "FL_TEST_CLIENT": str(number),
                "FL_TEST_NOTES": str(notes),
            }

        for daemon in (self.server, *self.clients) if layer.is_loaded() else ():
            page = Page(folder / "pages" / daemon.name, Path(daemon.settings["state_dir"]))
            self.pages[daemon.name] = page
            daemon.env |= page.variables

    def start(self) -> None:
        """Start all daemons, and a line for each client."""
        for folder in ("logs", "state"):
            (self.directory / folder).mkdir(parents=True, exist_ok=True)
        self.start_server()
        for client in self.clients:
            self.lines.append(self._stack.enter_context(Line(self.listen)))
            client.settings["server"] = self.lines[-1].address
            client.start()

    def stop(self) -> None:
        """Stop all daemons, and end the lines."""
        try:
            super().stop()
        finally:
            self._stack.close()

    def start_server(self) -> None:
        """Start the server, and wait until it is ready."""
        super().start_server()
        if self._killed_at is not None:
            self.down_seconds, self._killed_at = self.down_seconds + time.monotonic() - self._killed_at, None

    def count(self, what: str, whom: str) -> None:
        """Note that a harm was done to a daemon."""
        self.done[f"{what} of {whom}"] += 1

    def kill_daemon(self, daemon: Process) -> None:
        """Kill a daemon, and note it, if it has not ended by itself."""
        if daemon.running:
            self.count("kill -9", daemon.name)
        daemon.kill()
        if daemon is self.server and self._killed_at is None:
            self._killed_at = time.monotonic()

    def bring_back(self, daemon: Process) -> None:
        """Start a daemon that was killed; the server is ready then."""
        self.start_server() if daemon is self.server else daemon.start()

    def crash_at(self, daemon: Process, place: str) -> None:
        """Start a daemon that dies at a crash point, or where it is after some seconds, and bring it back."""
        self.kill_daemon(daemon)
        daemon.env["FL_CRASH_AT"] = place
        try:
            with suppress(Failure):  # a server may come to the crash point before it is ready
                self.bring_back(daemon)
        finally:
            del daemon.env["FL_CRASH_AT"]
        with suppress(TimeoutError):
            daemon.wait(_REACHED)
        if daemon.poll() == KILLED:
            self.count(f"crash at {place}", daemon.name)
        else:
            self.kill_daemon(daemon)
        self.bring_back(daemon)

    def freeze(self, daemon: Process, seconds: float) -> None:
        """Let a daemon stand still for some seconds."""
        daemon.send(signal.SIGSTOP)
        pause(seconds)
        daemon.send(signal.SIGCONT)
        self.count("freeze", daemon.name)

    def jump(self, daemon: Process, seconds: int) -> None:
        """Let the clock of a daemon be ahead by so many seconds from now on, or behind."""
        if page := self.pages.get(daemon.name):
            page.jump = seconds
            self.count("clock jump", daemon.name)
            if daemon is self.server:
                self.clock.append((time.time(), seconds))

    def mount_disk(self) -> None:
        """Put the server's state on a disk of its own, if this user may mount one."""
        self.state.mkdir(parents=True, exist_ok=True)
        mount = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "none", str(self.state)]
        if shutil.which("mount") and not subprocess.run(mount, capture_output=True, check=False).returncode:
            self.disk = self.state

    def unmount_disk(self) -> None:
        """Give the disk back, with all that is on it."""
        if self.disk is not None:
            subprocess.run(["umount", "--lazy", str(self.disk)], check=False)
            self.disk = None

    def ask(self, call: Callable[[Control], Any]) -> Any:
        """Return what `call` returns, from a server that may just have been started."""

        def attempt() -> Any:
            while True:
                try:
                    with Control(self.control) as control:
                        return call(control)
                except (Unreachable, grpc.RpcError) as error:
                    failure = error
                if not self.server.running:
                    raise failure
                pause(0.05)

        return wait_for(self, "an answer", attempt)

    def end_job(self, job_id: int) -> tuple[str, str]:
        """Stop the job, if it runs, and wait for its end; return its state and the reason."""

        def stop(control: Control) -> bool:
            if control.job(job_id).state not in ("queued", "running"):
                return True
            with suppress(Failure):  # it may be about to end by itself, or not be resumed yet
                control.stop_job(job_id)
            return False

        until(lambda: self.ask(stop))
        job = self.ask(lambda control: control.job(job_id))
        return job.state, job.reason

    def logs(self) -> dict[str, str]:
        """Return the logs of all daemons, by name."""
        daemons = (self.server, *self.clients)
        return {each.name: each.log.read_text(errors="replace") if each.log.exists() else "" for each in daemons}


def pause(seconds: float) -> None:
    """Let the daemons do what they do for a while: the moment of the next harm is random."""
    threading.Event().wait(seconds)


def pause_at_random(rng: Random, longest: float) -> None:
    """Pause for at most so many seconds."""
    pause(rng.uniform(0, longest))
