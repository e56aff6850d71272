"""fedring's programs and ranks of groups, forked from one process that has imported torch, gRPC and fedring already.

The imports take 2 to 4 seconds; a fork takes 20 milliseconds. Each process of the test run has its own fork server,
which starts with the first fork. A forked program runs its own `main`; only the start and the end of the interpreter
are not the real ones. Tests of those start the real program: `tests.fleets.Programs`.
"""

import atexit
import multiprocessing
import os
import random
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from multiprocessing import connection, forkserver
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import torch

from fedring.ctl.process import Process

FREEZE_SECONDS = float(os.environ.get("FEDRING_TEST_FREEZE_SECONDS", "0"))
"""The longest time for which daemons are frozen at random moments, as a busy machine does; 0 for never."""

_ENVIRONMENT = dict(os.environ)
"""The variables of this process before a test has changed any."""

_LOCK = threading.Lock()
"""Held to read exit codes: multiprocessing reads each only once, in the thread that asks first."""


def _fork(target: Callable[..., None], *arguments: Any) -> BaseProcess:
    """Call `target` in a fork, and return the running process."""
    process = multiprocessing.get_context("forkserver").Process(target=target, args=arguments)
    with _LOCK:
        _start_server()
        process.start()
    _running.add(process)
    return process


_running: "weakref.WeakSet[BaseProcess]" = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """Kill processes that a failed test has left; multiprocessing would wait for them."""
    for process in _running:
        process.kill()


@cache
def _start_server() -> None:
    """Start the fork server with this process's module path, which Python 3.11 does not pass on."""
    forkserver.set_forkserver_preload(["tests.preloaded"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    try:
        forkserver.ensure_running()
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before


def _join(process: BaseProcess, timeout: float | None = None) -> int | None:
    """Return the exit code of a process that `_fork` has started, or None if it still runs after the timeout."""
    connection.wait([process.sentinel], timeout)
    with _LOCK:
        return process.exitcode


def call_all(calls: Sequence[Callable[[], None]], *, seconds: float) -> list[int | None]:
    """Make all calls at once, each in its own fork; kill those that take longer; return the exit codes."""
    processes = [_fork(_call, call, _ENVIRONMENT) for call in calls]
    deadline = time.monotonic() + seconds
    try:
        for process in processes:
            _join(process, max(0.0, deadline - time.monotonic()))
    finally:
        for process in processes:
            process.kill()  # does nothing to those that have ended
    return [_join(process) for process in processes]


def _call(call: Callable[[], None], env: Mapping[str, str]) -> None:
    os.environ.clear()  # the fork server has the variables of the test that forked first
    os.environ.update(env)
    call()


def is_stopped(pid: int) -> bool:
    """Return whether a signal has frozen the process."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "T"
    return False


class Fork:
    """A running fork of `python -m module ARGUMENTS`, with the part of `subprocess.Popen`'s interface that tests use.

    It leads a session of its own. If `stdin` or `stdout` is `subprocess.PIPE`, the other ends are `self.stdin` and
    `self.stdout`.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        stdin: int = subprocess.DEVNULL,
        stdout: int,
        stderr: int = 2,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self.stdin: IO[bytes] | None = None
        self.stdout: IO[bytes] | None = None
        self.returncode: int | None = None
        self._ended = threading.Event()
        self._signals = threading.Lock()
        self._stopped = False
        ready, child_ready = os.pipe()
        opened = [child_ready]
        if stdin == subprocess.DEVNULL:
            stdin = os.open(os.devnull, os.O_RDONLY)
            opened.append(stdin)
        elif stdin == subprocess.PIPE:
            stdin, writing = os.pipe()
            opened.append(stdin)
            self.stdin = os.fdopen(writing, "wb", buffering=0)  # the caller closes it
        if stdout == subprocess.PIPE:
            reading, stdout = os.pipe()
            opened.append(stdout)
            self.stdout = os.fdopen(reading, "rb")
        if stderr == subprocess.STDOUT:
            stderr = stdout
        place = str(cwd or Path.cwd())
        streams = _Streams(stdin, stdout, stderr, child_ready)
        environment = dict(os.environ if env is None else env)
        try:
            self._process = _fork(_run_program, module, [*arguments], environment, place, streams)
        finally:
            for number in opened:
                os.close(number)
        os.read(ready, 1)  # returns when the child leads its session, or has ended
        os.close(ready)
        threading.Thread(target=self._watch, name=f"watch {module}", daemon=True).start()

    @property
    def pid(self) -> int:
        """The id of the process."""
        pid = self._process.pid
        assert pid is not None
        return pid

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, and return the exit code; raise `subprocess.TimeoutExpired` after `timeout` seconds."""
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send the signal if the process still runs."""
        with self._signals:
            self._stopped = number == signal.SIGSTOP
            self._kill(number)

    def stand_still(self, seconds: float) -> None:
        """Freeze the process for a while, unless a test or the process itself has frozen it."""
        if is_stopped(self.pid):
            return
        for number in (signal.SIGSTOP, signal.SIGCONT):
            with self._signals:
                if not self._stopped:
                    self._kill(number)
            if number == signal.SIGSTOP:
                self._ended.wait(seconds)

    def _kill(self, number: int) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):  # it has ended, but `_watch` does not know it yet
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float) -> tuple[str, None]:
        """Wait for its end; return what it has written to `stdout` since this call."""
        assert self.stdout is not None
        output = ThreadPoolExecutor(1).submit(self.stdout.read)
        self.wait(timeout)
        return output.result(timeout).decode(), None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Wait for its end, as `subprocess.Popen` does; kill it first after an error."""
        if error is not None:
            self.kill()
        self.wait()
        for stream in (self.stdin, self.stdout):
            if stream is not None:
                stream.close()

    def _watch(self) -> None:
        self.returncode = _join(self._process)
        self._ended.set()


def run(
    module: str, *arguments: str | Path, timeout: float, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run a fork of the program to its end, as `subprocess.run` does with `capture_output` and `text`."""
    words = [str(argument) for argument in arguments]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        fork = Fork(module, words, stdout=out.fileno(), stderr=err.fileno(), env=env, cwd=cwd)
        try:
            code = fork.wait(timeout)
        finally:
            fork.kill()
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return subprocess.CompletedProcess([module, *words], code, *texts)


class Daemon(Process):
    """A daemon that runs as a fork instead of in a new interpreter."""

    def launch(self, log: IO[bytes]) -> "Fork":  # type: ignore[override]  # as much of a Popen as is used
        """Start the daemon; see `Process.launch`."""
        fork = Fork(self.module, self.arguments, stdout=subprocess.PIPE, stderr=log.fileno(), env=self.environment)
        if FREEZE_SECONDS:
            threading.Thread(target=_freeze_at_random, args=(fork,), daemon=True).start()
        return fork


def _freeze_at_random(fork: Fork) -> None:
    chance = random.Random()  # of its own: a test that draws has the module's, and must draw the same again
    while fork.poll() is None:
        with suppress(subprocess.TimeoutExpired):
            fork.wait(chance.uniform(0, 4 * FREEZE_SECONDS))
        fork.stand_still(chance.uniform(0, FREEZE_SECONDS))


class _Streams:
    """File descriptors that a fork receives: its standard streams, and one that it closes when it has begun."""

    def __init__(self, *numbers: int) -> None:
        self._numbers = numbers

    def __reduce__(self) -> Any:
        return _received, ([DupFd(number) for number in self._numbers],)


def _received(files: list[Any]) -> list[int]:
    return [file.detach() for file in files]


def _run_program(module: str, arguments: list[str], env: Mapping[str, str], cwd: str, streams: list[int]) -> None:
    """Run the program in the fork."""
    os.setsid()
    *standard, _ = streams
    for number, stream in enumerate(standard):
        os.dup2(stream, number)
    for stream in streams:
        os.close(stream)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  # multiprocessing has replaced it
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.path[:0] = [cwd, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv = [module, *arguments]
    if threads := env.get("OMP_NUM_THREADS"):  # torch reads it only when it is imported
        torch.set_num_threads(int(threads))
    try:
        sys.modules.pop(module, None)  # as a program, the module is `__main__`
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:  # the end of a normal program; multiprocessing leaves the second call out
        threading._shutdown()  # type: ignore[attr-defined]  # typeshed does not know it
        atexit._run_exitfuncs()
