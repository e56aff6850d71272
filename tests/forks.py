"""Programs of ours and ranks of groups, forked from one process that has imported torch, gRPC and fedring already.

Importing them takes a process 2 to 4 seconds; a fork takes 20 milliseconds. Each process of the test run has a fork
server of its own, which starts with the first fork. A forked program runs its own `main`; only the start and the end of
the interpreter are not the real ones. Tests that are about those start the program itself: `tests.fleets.Programs`.
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
"""How long daemons are frozen at most, now and then and at random, as on a machine that stands still; 0 for never."""

_ENVIRONMENT = dict(os.environ)
"""The variables of this process before any test has changed one."""

_LOCK = threading.Lock()
"""multiprocessing reads an exit code once, in whichever thread asks first; only one at a time may ask."""


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
    """End what a failed test has left behind, for which multiprocessing would wait."""
    for process in _running:
        process.kill()


@cache
def _start_server() -> None:
    """Start the fork server, which finds modules where this process does: Python 3.11 keeps that from it."""
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
    """Make each call in a fork of its own, all at once; return their exit codes. Those that take longer are killed."""
    processes = [_fork(_call, call, _ENVIRONMENT) for call in calls]
    deadline = time.monotonic() + seconds
    try:
        for process in processes:
            _join(process, max(0.0, deadline - time.monotonic()))
    finally:
        for process in processes:
            process.kill()  # which does nothing to those that have ended
    return [_join(process) for process in processes]


def _call(call: Callable[[], None], env: Mapping[str, str]) -> None:
    os.environ.clear()  # the fork server has that of the test that forked first
    os.environ.update(env)
    call()


def is_stopped(pid: int) -> bool:
    """Return whether a signal has frozen the process."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "T"
    return False


class Fork:
    """A running fork of `python -m module ARGUMENTS`, with the part of `subprocess.Popen`'s interface that tests use.

    It leads a session of its own. `stdin` and `stdout` may be `subprocess.PIPE`; the ends are then `self.stdin` and
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
            self.stdin = os.fdopen(writing, "wb", buffering=0)  # whoever uses the fork closes it
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
        """The process's number."""
        pid = self._process.pid
        assert pid is not None
        return pid

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code once it has ended; raise `subprocess.TimeoutExpired` if it has not in time."""
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it the signal, if it still runs."""
        with self._signals:
            self._stopped = number == signal.SIGSTOP
            self._kill(number)

    def stand_still(self, seconds: float) -> None:
        """Freeze it for a while, unless it is frozen already, by a test or by itself."""
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
            with suppress(ProcessLookupError):  # it has ended, and nobody has been told yet
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to stop."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float) -> tuple[str, None]:
        """Return all that it writes to `stdout` from now on, once it has ended."""
        assert self.stdout is not None
        output = ThreadPoolExecutor(1).submit(self.stdout.read)
        self.wait(timeout)
        return output.result(timeout).decode(), None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Wait for its end, as `subprocess.Popen` does; after an error, end it at once."""
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
    """A daemon that is forked where the real one would start an interpreter."""

    def launch(self, log: IO[bytes]) -> "Fork":  # type: ignore[override]  # as much of a Popen as is used
        """Start it; see `Process.launch`."""
        fork = Fork(self.module, self.arguments, stdout=subprocess.PIPE, stderr=log.fileno(), env=self.environment)
        if FREEZE_SECONDS:
            threading.Thread(target=_freeze_at_random, args=(fork,), daemon=True).start()
        return fork


def _freeze_at_random(fork: Fork) -> None:
    while fork.poll() is None:
        with suppress(subprocess.TimeoutExpired):
            fork.wait(random.uniform(0, 4 * FREEZE_SECONDS))
        fork.stand_still(random.uniform(0, FREEZE_SECONDS))


class _Streams:
    """Open files that a fork gets as well: its standard streams, and one to close when it has begun."""

    def __init__(self, *numbers: int) -> None:
        self._numbers = numbers

    def __reduce__(self) -> Any:
        return _received, ([DupFd(number) for number in self._numbers],)


def _received(files: list[Any]) -> list[int]:
    return [file.detach() for file in files]


def _run_program(module: str, arguments: list[str], env: Mapping[str, str], cwd: str, streams: list[int]) -> None:
    """Become the program, in the fork."""
    os.setsid()
    *standard, _ = streams
    for number, stream in enumerate(standard):
        os.dup2(stream, number)
    for stream in streams:
        os.close(stream)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  # multiprocessing has put another one in its place
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.path[:0] = [cwd, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv = [module, *arguments]
    if threads := env.get("OMP_NUM_THREADS"):  # which torch reads when it is imported
        torch.set_num_threads(int(threads))
    try:
        sys.modules.pop(module, None)  # as a program, it is called `__main__`
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:  # a program ends so; multiprocessing leaves out the second
        threading._shutdown()  # type: ignore[attr-defined]  # typeshed does not know it
        atexit._run_exitfuncs()
