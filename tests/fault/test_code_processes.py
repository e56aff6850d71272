"""The code of jobs in a process of its own: whatever happens to it, fl-client goes on, and nothing half done counts."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedring.v1 import control_pb2 as pb
from tests.conftest import ROOT, path_to
from tests.fault.faulty_fleet import FaultyFleet, wait_for
from tests.fault.gate import Gate
from tests.fleets import Control, run_job, until_watching

HERE = Path(__file__).parent
TRUSTED = ["fedring", "user_processes", "user_trainers"]
APART: dict[str, Any] = {"process": True}
JOB: dict[str, Any] = {"rounds": 1, "subset_size": 32, "batch_size": 8, "evaluate": False, "min_clients": 1, "seed": 5}
CODE = Path(f"{HERE}{os.pathsep}{ROOT}")


def fleet_of(folder: Path, training: dict[str, Any], clients: int = 1) -> FaultyFleet:
    """Return a fleet whose clients run the code of jobs as the table [training] says."""
    parts = [{"trusted": TRUSTED, "partition_index": each, "partition_count": clients} for each in range(clients)]
    return FaultyFleet(
        folder, {"trusted": TRUSTED}, [{**part, "training": training} for part in parts], env=path_to(CODE)
    )


def processes_of(fleet: FaultyFleet) -> list[int]:
    """Return the processes that the first client has started."""
    pid = fleet.clients[0].pid
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyFleet]:
    """Start a client that ends code at 2 GB."""
    limits = {**APART, "max_memory_bytes": 2 << 30}
    with fleet_of(tmp_path_factory.mktemp("limits"), limits) as fleet, Control(fleet.control) as control:
        until_watching(control, 1)
        yield fleet


WORST = [
    ("user_processes:grows", "out_of_memory: client-0", "The job's code had 2,"),
    ("user_processes:crashes", "process_ended", "The process of the job's code ended by signal 11 (SIGSEGV)."),
    pytest.param(
        "user_processes:leaves",
        "process_ended",
        "The process of the job's code ended with exit code 3.",
        marks=pytest.mark.soak,
    ),
]


@pytest.mark.parametrize(("trainer", "reason", "sentence"), WORST)
def test_code_that_does_the_worst_fails_its_round_and_nothing_else(
    fleet: FaultyFleet, trainer: str, reason: str, sentence: str
) -> None:
    with Control(fleet.control) as control:
        pid = fleet.clients[0].pid
        job = run_job(control, {**JOB, "trainer": trainer})
        assert job.state == "failed"
        assert reason.partition(":")[0] in job.reason
        assert sentence in job.reason, job.reason
        assert run_job(control, JOB).state == "completed"
        assert fleet.clients[0].pid == pid


def test_code_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    with fleet_of(tmp_path, {**APART, "max_seconds": 3}) as fleet, Control(fleet.control) as control:
        until_watching(control, 1)
        for keys in ({"data": "user_processes:hanging_data"}, {"trainer": "user_processes:hangs"}):
            job = run_job(control, {**JOB, **keys})
            text = "too_long: The job's code took longer than this client's training.max_seconds = 3."
            assert text in job.reason, job.reason
        assert processes_of(fleet) == []


@pytest.mark.soak
def test_an_evaluator_that_crashes_is_told_and_the_next_one_works(fleet: FaultyFleet) -> None:
    with Control(fleet.control) as control:
        job = run_job(control, {**JOB, "evaluate": True, "evaluator": "user_processes:crashing_evaluator"})
        assert "client-0 could not evaluate model" in job.reason
        assert "ended by signal 11 (SIGSEGV)" in job.reason
        assert run_job(control, {**JOB, "evaluate": True}).state == "completed"


def test_a_mode_that_cannot_run_apart_is_refused(fleet: FaultyFleet) -> None:
    with Control(fleet.control) as control:
        job = run_job(control, {**JOB, "mode": "data_parallel"})
        assert "this client has training.process = true, which the mode data_parallel cannot do" in job.reason


def test_code_that_never_ends_is_ended_with_its_round(tmp_path: Path) -> None:
    with fleet_of(tmp_path, APART) as fleet, Control(fleet.control) as control:
        until_watching(control, 1)
        events = control.events()
        stuck = control.start_job({**JOB, "trainer": "user_processes:hangs"}).job_id
        wait_for(fleet, "the start", lambda: next(each for each in events if each.kind == "round_started"))
        wait_for(fleet, "the training", lambda: until(lambda: control.clients()[0].activity == 2))
        events.cancel()
        control.stop_job(stuck)
        assert run_job(control, JOB).state == "completed"
        assert len(processes_of(fleet)) == 1


def until(happened: Any) -> None:
    while not happened():
        pass


EQUAL: dict[str, dict[str, Any]] = {
    "plain": {"evaluate": True},
    "corrected": {"scaffold": True, "weights": "uniform", "momentum": 0.0},
    "own": {"personal": {"method": "ditto"}, "evaluate": True},
    "trainer": {"trainer": "user_trainers:gated", "encoding": "fp32"},
    "residual": {"encoding": "packed"},
}


def test_models_are_the_same_byte_for_byte(tmp_path: Path) -> None:
    digests: list[dict[str, tuple[str, dict[str, float]]]] = []
    for name, training in (("apart", APART), ("here", {})):
        found: dict[str, tuple[str, dict[str, float]]] = {}
        with fleet_of(tmp_path / name, training, 2) as fleet, Control(fleet.control) as control:
            until_watching(control, 2)
            for kind, keys in EQUAL.items():
                job = run_job(control, {**JOB, "rounds": 2, "min_clients": 2, "start": "fresh", **keys})
                assert job.state == "completed", (kind, job.reason)
                round_: pb.Round = control.rounds(limit=1)[0]
                found[kind] = control.models(limit=1)[0].digest, dict(round_.metrics)
            assert [len(processes_of(fleet))] == [1 if training else 0]
        digests.append(found)
    assert digests[0] == digests[1]


def spent(fleet: FaultyFleet) -> list[dict[str, Any]]:
    """Return the steps with noise that are charged to the client's samples."""
    text = next((fleet.directory / "state" / "client-0").glob("privacy.json")).read_text()
    return json.loads(text.partition("\n")[2])["samples"]  # type: ignore[no-any-return]


def test_a_process_that_is_killed_leaves_no_update_and_is_charged(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    fleet = fleet_of(tmp_path, APART)
    gate.close_for(fleet.clients[0])
    noise = {"sample_dp": {"noise_multiplier": 1.0, "max_grad_norm": 1.0}, "weights": "uniform"}
    with fleet, Control(fleet.control) as control:
        until_watching(control, 1)
        events = control.events()
        # Without noise: the round fails, with a sentence.
        plain = control.start_job({**JOB, "optimizer": "user_processes:gated"}).job_id
        gate.wait(fleet)
        (child,) = processes_of(fleet)
        os.kill(child, signal.SIGKILL)
        wait_for(fleet, "the end of the job", lambda: list(control.follow_job(plain, events)))
        assert (
            "ended by signal 9 (SIGKILL), as it does if the machine has too little memory" in control.job(plain).reason
        )
        assert control.clients()[0].updates == 0
        # With noise: the update has nothing of the samples, and its cost is in the account.
        events = control.events()
        noisy = control.start_job({**JOB, **noise, "optimizer": "user_processes:gated"}).job_id
        gate.wait(fleet)
        (tmp_path / "gate").unlink()  # what trains after this does not wait
        (child,) = processes_of(fleet)
        os.kill(child, signal.SIGKILL)
        wait_for(fleet, "the end of the job", lambda: list(control.follow_job(noisy, events)))
        assert control.job(noisy).state == "completed"
        assert control.clients()[0].updates == 1
        assert len(spent(fleet)) == 1
        events.cancel()


def test_the_process_ends_with_a_client_that_is_killed(tmp_path: Path) -> None:
    with fleet_of(tmp_path, APART) as fleet, Control(fleet.control) as control:
        until_watching(control, 1)
        control.start_job({**JOB, "trainer": "user_processes:hangs"})
        wait_for(fleet, "the training", lambda: until(lambda: control.clients()[0].activity == 2))
        (child,) = processes_of(fleet)
        fleet.clients[0].kill()
        wait_for(fleet, "the end of the process", lambda: until(lambda: not lives(child)))
