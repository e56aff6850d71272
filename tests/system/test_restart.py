"""fl-client imports edited code anew on SIGUSR2, in the same process id, and only if it would start."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedring.ctl.process import Process, stop_all
from tests.conftest import path_to
from tests.fleets import PATIENT, Control, Fleet, run_job, until_watching
from tests.waiting import until

TRAINER = """
import os

def train(model, samples, plan):
    os.chdir(os.environ["ELSEWHERE"])
    return {"num_samples": 1, "edition": EDITION}
"""
JOB = {"min_clients": 1, "evaluate": False}


@contextmanager
def client_of(fleet: Fleet, code: Path, elsewhere: Path) -> Iterator[Process]:
    """Run a client in an interpreter of its own, as it begins anew in one, whose code changes to another directory."""
    settings = {"client_id": "client-0", "server": fleet.listen, "state_dir": "client-0", "trainer": "wards:train"}
    process = Process("client-0", "fedring.client.main", settings, fleet.directory / "logs" / "client-0.log")
    process.env |= PATIENT | path_to(code) | {"ELSEWHERE": str(elsewhere)}
    process.prefix = ("env", "--chdir", str(fleet.directory))
    process.start()
    try:
        yield process
    finally:
        stop_all([process], 60)


def edition(control: Control) -> float:
    """Run a job, and return which edition of the trainer has trained it."""
    job = run_job(control, JOB)
    assert job.state == "completed", job.reason
    (round_,) = control.rounds(job_id=job.job_id)
    return round_.metrics["train/edition"]


def logged(log: Path, text: str) -> bool:
    """Return whether the client has logged a line with this text."""
    lines = log.read_text(encoding="utf-8").splitlines(keepends=True)
    return any(text in json.loads(line)["text"] for line in lines if line.startswith("{") and line.endswith("\n"))


def test_a_client_runs_edited_code_after_sigusr2_and_keeps_running_if_it_is_broken(tmp_path: Path) -> None:
    code = tmp_path / "code" / "wards.py"
    code.parent.mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    code.write_text(TRAINER.replace("EDITION", "1"))
    with (
        Fleet(tmp_path) as fleet,
        client_of(fleet, code.parent, elsewhere) as process,
        Control(fleet.control) as control,
    ):
        until_watching(control, 1)
        pid = process.pid  # exec keeps it
        assert edition(control) == 1
        code.write_text(TRAINER.replace("EDITION", "2"))
        os.utime(code, ns=(1, 1))  # another time than before, however fast this is
        assert edition(control) == 1  # a process imports a module once
        events = control.events()
        os.kill(pid, signal.SIGUSR2)
        next(event for event in events if event.kind == "client_joined")
        events.cancel()
        assert edition(control) == 2
        code.write_text("this is not Python\n")
        os.kill(pid, signal.SIGUSR2)
        until(lambda: logged(process.log, "not restarted"))
        assert edition(control) == 2
        os.kill(pid, signal.SIGTERM)
        assert process.wait(60) == 0
    assert list(elsewhere.iterdir()) == []
