"""The forks in which tests run programs and ranks: quick to start, and otherwise like real programs."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from tests import forks
from tests.waiting import until

SECONDS = 60.0

pytestmark = pytest.mark.programs


def report(file: Path) -> None:
    """Write to a file which preloaded modules this process lacks, and how many threads its parent has."""
    threads = len(list(Path(f"/proc/{os.getppid()}/task").iterdir()))
    preloaded = sys.modules["tests.preloaded"]
    file.write_text(json.dumps({"missing": sorted({*preloaded.MODULES} - {*sys.modules}), "threads": threads}))


def test_a_fork_has_imported_everything_and_comes_from_a_process_with_one_thread(tmp_path: Path) -> None:
    assert forks.call_all([partial(report, tmp_path / "report")], seconds=SECONDS) == [0]
    assert json.loads((tmp_path / "report").read_text()) == {"missing": [], "threads": 1}


def test_a_fork_that_takes_too_long_is_killed() -> None:
    assert forks.call_all([partial(time.sleep, 600)], seconds=0.5) == [-signal.SIGKILL]
    assert forks.call_all([partial(time.sleep, 0)] * 2, seconds=SECONDS) == [0, 0]


PROGRAM = """
import atexit, os, sys, threading
if __name__ == "__main__":
    atexit.register(print, "at exit")
    print(sys.argv[1:], os.environ["WORD"], os.getcwd(), os.getsid(0) == os.getpid(), sys.stdin.read(), flush=True)
    threading.Timer(0.2, print, ["a thread"]).start()
    sys.exit("the end")
"""


def test_a_fork_behaves_like_the_program(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = forks.run("program", "a", "b", timeout=SECONDS, env={"WORD": "word"}, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "the end\n")
    assert done.stdout.splitlines() == [f"['a', 'b'] word {tmp_path} True ", "a thread", "at exit"]


@pytest.mark.parametrize("module", ["fedring.server.main", "fedring.client.main", "fedring.ctl.main"])
def test_a_forked_program_prints_what_a_started_one_does(module: str) -> None:
    words = [sys.executable, "-m", module, "--version"]
    started = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, check=True)
    forked = forks.run(module, "--version", timeout=SECONDS)
    assert (forked.returncode, forked.stdout, forked.stderr) == (0, started.stdout, started.stderr)


def test_a_stopped_fork_does_nothing_until_it_is_continued(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import sys\nprint(sys.stdin.readline(), end='')\n")
    pipe = subprocess.PIPE
    with forks.Fork("program", [], stdin=pipe, stdout=pipe, cwd=tmp_path) as fork:
        fork.send_signal(signal.SIGSTOP)
        until(lambda: forks.is_stopped(fork.pid))
        fork.stand_still(0)  # must not continue it, since the test has stopped it
        assert forks.is_stopped(fork.pid)
        assert fork.stdin is not None
        fork.stdin.write(b"word\n")
        fork.send_signal(signal.SIGCONT)
        assert fork.communicate(SECONDS) == ("word\n", None)
