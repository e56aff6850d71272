"""The code of jobs in a process of its own: whatever happens to it, fl-client goes on, and nothing half done counts."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedring.v1 import control_pb2 as pb
from tests.conftest import ROOT, path_to
from tests.fault.faulty_fleet import FaultyFleet, wait_for
from tests.fleets import Control, run_job, until_watching
from tests.processes import children_of, lives

HERE = Path(__file__).parent
TRUSTED = ["fedring", "user_processes", "user_trainers"]
FORKED = [*TRUSTED, "forked_code"]
APART: dict[str, Any] = {"process": True}
JOB: dict[str, Any] = {"rounds": 1, "subset_size": 32, "batch_size": 8, "evaluate": False, "min_clients": 1, "seed": 5}
NOISE: dict[str, Any] = {"sample_dp": {"noise_multiplier": 1.0, "max_grad_norm": 1.0}, "weights": "uniform"}
HURRIED = {"clients": {"kind": "hurried"}}
CODE = Path(f"{HERE}{os.pathsep}{ROOT}")


def processes_of(fleet: FaultyFleet, client: int = 0) -> list[int]:
    """Return the processes that a client has started."""
    return children_of(fleet.clients[client].pid)


def until(happened: Any) -> None:
    while not happened():
        pass


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyFleet]:
    """Start a client that ends code at 2 GB, and one that ends it after 3 seconds; their code runs in forks."""
    folder = tmp_path_factory.mktemp("limits")
    limits = ({"max_memory_bytes": 2 << 30}, {"max_seconds": 3})
    clients = [
        {
            "trusted": FORKED,
            "labels": {"kind": kind},
            "partition_index": 0,
            "partition_count": 1,
            "training": APART | limit,
        }
        for kind, limit in zip(("plain", "hurried"), limits, strict=True)
    ]
    env = {**path_to(CODE), "FL_TEST_KILL": str(folder / "kill")}
    with FaultyFleet(folder, {"trusted": TRUSTED}, clients, env=env) as fleet:
        with Control(fleet.control) as control:
            until_watching(control, 2)
        yield fleet


@pytest.fixture
def control(fleet: FaultyFleet) -> Iterator[Control]:
    with Control(fleet.control) as control:
        yield control


def run_here(control: Control, **keys: Any) -> pb.Job:
    """Run a job on the first client."""
    return run_job(control, {**JOB, "clients": {"kind": "plain"}, "start": "fresh", **keys})


WORST = [
    ({"trainer": "user_processes:grows"}, "out_of_memory", "The job's code had 2,"),
    (
        {"trainer": "user_processes:crashes"},
        "process_ended",
        "The process of the job's code ended by signal 11 (SIGSEGV).",
    ),
    ({"trainer": "user_processes:leaves"}, "process_ended", "The process of the job's code ended with exit code 3."),
    (
        {"data": "user_processes:announcing_data"},
        "process_ended",
        "has sent nonsense: a message of 2 and 2147483649 bytes",
    ),
]


@pytest.mark.parametrize(("keys", "reason", "sentence"), WORST)
def test_code_that_does_the_worst_fails_its_round_and_nothing_else(
    fleet: FaultyFleet, control: Control, keys: dict[str, Any], reason: str, sentence: str
) -> None:
    pid = fleet.clients[0].pid
    job = run_here(control, **keys)
    assert job.state == "failed"
    assert reason in job.reason
    assert sentence in job.reason, job.reason
    assert run_here(control).state == "completed"
    assert fleet.clients[0].pid == pid


@pytest.mark.parametrize("keys", [{"data": "user_processes:hanging_data"}, {"trainer": "user_processes:hangs"}])
def test_code_that_takes_too_long_is_ended(fleet: FaultyFleet, control: Control, keys: dict[str, Any]) -> None:
    job = run_job(control, {**JOB, **HURRIED, **keys})
    text = "too_long: The job's code took longer than this client's training.max_seconds = 3."
    assert text in job.reason, job.reason
    assert processes_of(fleet, 1) == []


def test_an_evaluator_that_crashes_is_told_and_the_next_one_works(control: Control) -> None:
    job = run_here(control, evaluate=True, evaluator="user_processes:crashing_evaluator")
    assert "client-0 could not evaluate model" in job.reason
    assert "ended by signal 11 (SIGSEGV)" in job.reason
    assert run_here(control, evaluate=True).state == "completed"


def test_a_mode_that_cannot_run_apart_is_refused(control: Control) -> None:
    job = run_here(control, mode="data_parallel")
    assert "this client has training.process = true, which the mode data_parallel cannot do" in job.reason


def client(control: Control) -> pb.Client:
    """Return the first client, as operators see it."""
    return next(each for each in control.clients() if each.client_id == "client-0")


def test_code_that_never_ends_is_ended_with_its_round(fleet: FaultyFleet, control: Control) -> None:
    stuck = control.start_job({**JOB, "clients": {"kind": "plain"}, "trainer": "user_processes:hangs"}).job_id
    wait_for(fleet, "the training", lambda: until(lambda: client(control).activity == 2))
    control.stop_job(stuck)
    assert run_here(control).state == "completed"
    assert len(processes_of(fleet)) == 1


def spent(fleet: FaultyFleet) -> list[Any]:
    """Return the steps with noise that are charged to the client's samples."""
    file = fleet.directory / "state" / "client-0" / "privacy.json"
    return json.loads(file.read_text().partition("\n")[2])["samples"] if file.exists() else []


@pytest.mark.parametrize("keys", [{}, NOISE], ids=["plain", "noise"])
@pytest.mark.parametrize("moment", ["first", "middle", "sending", "sent"])
def test_a_process_that_is_killed_leaves_no_half_update_and_no_noise_that_is_not_charged(
    fleet: FaultyFleet, control: Control, moment: str, keys: dict[str, Any]
) -> None:
    """It is killed before its first step, before its third one, within its result, and right after its last byte."""
    job = {**keys, "optimizer": "user_processes:killed", "optimizer_args": {"moment": moment}, "encoding": "fp32"}
    whole = run_here(control, **job)
    assert whole.state == "completed", whole.reason
    (good,) = control.models(limit=1)
    updates, charges, (child,) = client(control).updates, spent(fleet), processes_of(fleet)
    (fleet.directory / "kill").touch()
    done = run_here(control, **job)
    assert not (fleet.directory / "kill").exists()  # it was killed
    wait_for(fleet, "the end of the process", lambda: until(lambda: not lives(child)))  # or the next test would get it
    if not keys and moment != "sent":  # The round fails, with a sentence, and nothing was sent.
        assert "ended by signal 9 (SIGKILL), as it does if the machine has too little memory" in done.reason
        assert client(control).updates == updates
        return
    assert done.state == "completed"
    assert client(control).updates == updates + 1
    if keys:  # The update has nothing of the samples, or all of a training: the noise covers it, and is in the account.
        (charge,) = (each for each in spent(fleet) if each not in charges)
        assert charge["steps"] == 4, charge
    else:
        assert control.models(limit=1)[0].digest == good.digest  # the whole result


def test_the_process_ends_with_a_client_that_is_killed(fleet: FaultyFleet, control: Control) -> None:
    job = control.start_job({**JOB, "clients": {"kind": "plain"}, "trainer": "user_processes:hangs"}).job_id
    # A client is training already while its process starts.
    wait_for(fleet, "the training", lambda: until(lambda: client(control).activity == 2 and processes_of(fleet)))
    (child,) = processes_of(fleet)
    fleet.clients[0].kill()
    wait_for(fleet, "the end of the process", lambda: until(lambda: not lives(child)))
    control.stop_job(job)
    fleet.clients[0].start()
    until_watching(control, 2)


EQUAL: dict[str, dict[str, Any]] = {
    "plain": {"evaluate": True},
    "corrected": {"scaffold": True, "weights": "uniform", "momentum": 0.0},
    "own": {"personal": {"method": "ditto"}, "evaluate": True},
    "trainer": {"trainer": "user_trainers:gated", "encoding": "fp32"},
    "residual": {"encoding": "packed"},
}


def test_models_are_the_same_byte_for_byte(tmp_path: Path) -> None:
    """Those of a client whose code runs in another process, a new interpreter, and of one that runs it itself."""
    digests: list[dict[str, tuple[str, dict[str, float]]]] = []
    for name, training in (("apart", APART), ("here", {})):
        found: dict[str, tuple[str, dict[str, float]]] = {}
        options = {"trusted": TRUSTED, "training": training}
        fleet = FaultyFleet(tmp_path / name, {"trusted": TRUSTED}, [options], env=path_to(CODE))
        with fleet, Control(fleet.control) as control:
            until_watching(control, 1)
            for kind, keys in EQUAL.items():
                job = run_job(control, {**JOB, "rounds": 2, "start": "fresh", **keys})
                assert job.state == "completed", (kind, job.reason)
                round_: pb.Round = control.rounds(limit=1)[0]
                found[kind] = control.models(limit=1)[0].digest, dict(round_.metrics)
            assert [len(processes_of(fleet))] == [1 if training else 0]
            if training:
                end_with_the_client(fleet)
        digests.append(found)
    assert digests[0] == digests[1]


def end_with_the_client(fleet: FaultyFleet) -> None:
    """Kill the client, and wait for the end of the interpreter that runs the code of its jobs."""
    (child,) = processes_of(fleet)
    fleet.clients[0].kill()
    wait_for(fleet, "the end of the process", lambda: until(lambda: not lives(child)))
