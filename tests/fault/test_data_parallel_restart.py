"""Data-parallel jobs whose workers are all killed at once, and go on from the checkpoints on their disks.

With FEDRING_REPEATS, tests are repeated, each time with another random step.
"""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from fedring.daemon.crash import TRAINING
from fedring.train.tensors.files import read_tensors
from fedring.workers.shards import count_steps
from tests.conftest import REPEATED, path_to
from tests.fault.faulty_fleet import SECONDS, FaultyFleet, StartedJob
from tests.fault.planned_signal import PlannedSignal, workers_and_step
from tests.fleets import Control

HERE = Path(__file__).parent
TRUSTED = {"trusted": ["fedring", "signalled_models", "tests.unit.group_member"]}
SAMPLES, BATCH, EVERY, ROUNDS = 1437, 64, 5, 2
LEFT = 4
"""Steps, at least, that are left when a worker tells a test to kill it."""


def job(**table: Any) -> dict[str, Any]:
    """Return a job whose residuals, momentum and random numbers matter to its result."""
    return {
        "mode": "data_parallel",
        "min_clients": table.pop("workers"),
        "model": "signalled_models:dropout_net",
        "model_args": {"hidden": table.pop("hidden", 32)},
        "optimizer_args": {"weight_decay": 0.001},
        "rounds": ROUNDS,
        "start": "fresh",
        "batch_size": BATCH,
        "evaluate": False,
        "deadline_seconds": 240,
        "data_parallel": {
            "replacement_seconds": 120,
            "checkpoint_every": EVERY,
            "bucket_mb": 0.001,
            "ratio": 0.05,
            **table,
        },
    }


def fleet_of(workers: int, folder: Path) -> FaultyFleet:
    return FaultyFleet(folder, {**TRUSTED, "keep_models": 20}, [TRUSTED] * workers, env=path_to(HERE))


def model_of(control: Control, path: Path) -> dict[str, torch.Tensor]:
    """Return the newest model of the server, by way of a file."""
    control.export_model(0, path)
    return read_tensors(path)


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def expected_step(step: int, workers: int) -> int:
    """Return the newest checkpoint that all workers have when they are killed in the pass `step`, from 1."""
    steps = count_steps(SAMPLES, workers, BATCH)
    ends = {number * steps for number in range(ROUNDS + 1)}
    return max(done for done in range(step) if done % EVERY == 0 or done in ends)


@pytest.mark.parametrize("repeat", REPEATED)
@pytest.mark.parametrize(
    ("workers", "table"),
    [
        (2, {"hook": "dgc(nesterov=true)"}),
        (3, {"hook": "batched_powersgd", "start_iteration": 2}),  # its factors depend on DDP's buckets
        pytest.param(3, {"hook": "none"}, marks=pytest.mark.soak),
        pytest.param(3, {"hook": "none", "hidden": 4096, "bucket_mb": 0.5}, marks=pytest.mark.soak),  # around the ring
        pytest.param(2, {"hook": "topk", "feedback": "ef21"}, marks=pytest.mark.soak),
        pytest.param(3, {"hook": "int8"}, marks=pytest.mark.soak),
        pytest.param(3, {"hook": "fp16(powersgd)", "start_iteration": 2}, marks=pytest.mark.soak),
        pytest.param(3, {"hook": "tests.unit.group_member:own_with_state"}, marks=pytest.mark.soak),
    ],
)
def test_a_job_whose_workers_are_all_killed_ends_as_if_nothing_had_happened(
    workers: int, table: dict[str, Any], repeat: int, tmp_path: Path
) -> None:
    fleet, passes = fleet_of(workers, tmp_path), ROUNDS * count_steps(SAMPLES, workers, BATCH)
    planned = PlannedSignal(fleet, 0, passes=passes - LEFT, workers=workers)  # harms nobody
    with fleet, Control(fleet.control) as control:
        started = StartedJob(fleet, control, job(**table, workers=workers))
        planned.wait()
        for number in range(workers):
            fleet.clients[number].send(signal.SIGKILL)
        del fleet.clients[planned.victim].env["FL_TEST_SIGNAL"]
        for number in range(workers):
            fleet.restart(number)
        events = started.rest()
        lost = [place for place, event in enumerate(events) if event.kind == "group_lost"]
        if lost:  # else they were killed between two rounds
            _, step = workers_and_step(next(event for event in events[lost[-1] :] if event.kind == "group_formed"))
            assert step in {expected_step(planned.step + late, workers) for late in range(passes)}  # until the kill
        disturbed = model_of(control, tmp_path / "disturbed.safetensors")
        StartedJob(fleet, control, job(**table, workers=workers)).until("job_ended")
        assert_equal(disturbed, model_of(control, tmp_path / "undisturbed.safetensors"))


def test_a_worker_that_dies_while_it_writes_a_checkpoint_takes_over_that_of_another(tmp_path: Path) -> None:
    (place,) = TRAINING
    fleet = fleet_of(2, tmp_path)
    fleet.clients[0].env["FL_CRASH_AT"] = place
    with fleet, Control(fleet.control) as control:
        started = StartedJob(fleet, control, job(workers=2, hook="dgc"))
        fleet.clients[0].wait(SECONDS)
        started.until("group_lost")  # in the step after the checkpoint
        fleet.clients[1].send(signal.SIGKILL)
        (folder,) = (tmp_path / "state" / "client-0" / "checkpoints").iterdir()
        assert [path.suffix for path in folder.iterdir()] == [".part"]
        del fleet.clients[0].env["FL_CRASH_AT"]
        fleet.restart(0)
        fleet.restart(1)
        assert workers_and_step(started.until("group_formed")) == (2, 0)
        started.until("job_ended")
        assert control.job(started.job_id).state == "completed"  # so the parameters of all workers were equal
        rounds = control.rounds(job_id=started.job_id)
    steps = {client.metrics["job_steps"] for round_ in rounds for client in round_.clients}
    assert max(steps) == ROUNDS * count_steps(SAMPLES, 2, BATCH)


def test_a_worker_that_is_killed_after_the_last_step_of_a_round_delivers_what_its_checkpoint_holds(
    tmp_path: Path,
) -> None:
    fleet = fleet_of(1, tmp_path)
    fleet.clients[0].env["FL_CRASH_AT"] = "client_update_spooled"
    with fleet, Control(fleet.control) as control:
        started = StartedJob(fleet, control, job(workers=1, hook="none") | {"rounds": 1})
        fleet.clients[0].wait(SECONDS)
        (tmp_path / "state" / "client-0" / "update").unlink()  # as if it had been killed just before
        del fleet.clients[0].env["FL_CRASH_AT"]
        fleet.restart(0)
        started.until("update_accepted")
        started.until("job_ended")
        (round_,) = control.rounds(job_id=started.job_id)
    (client,) = round_.clients
    assert (round_.phase, client.metrics["job_steps"]) == ("published", count_steps(SAMPLES, 1, BATCH))
    assert client.metrics["steps"] == 0  # nothing was trained again


@pytest.mark.soak
def test_fewer_workers_go_on_from_their_checkpoints(tmp_path: Path) -> None:
    fleet, passes = fleet_of(3, tmp_path), count_steps(SAMPLES, 3, BATCH)
    planned = PlannedSignal(fleet, 0, passes=passes, workers=3)  # harms nobody
    spec = job(workers=3, hook="topk", feedback="ef21", replacement_seconds=1)
    with fleet, Control(fleet.control) as control:
        started = StartedJob(fleet, control, {**spec, "rounds": 1, "min_clients_to_aggregate": 2})
        planned.wait()
        for client in fleet.clients:
            client.send(signal.SIGKILL)
        del fleet.clients[planned.victim].env["FL_TEST_SIGNAL"]
        fleet.restart(0)
        fleet.restart(1)
        started.until("group_lost")
        workers, step = workers_and_step(started.until("group_formed"))
        assert (workers, step) in [(2, expected_step(planned.step + late, 3)) for late in range(passes)]
        started.until("job_ended")
        assert control.job(started.job_id).state == "completed"
