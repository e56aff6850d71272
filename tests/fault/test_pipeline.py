"""Pipeline jobs on real daemons, one stage of which dies or freezes: the job ends as if nothing had happened.

With FEDRING_REPEATS, tests are repeated, each time with another random step.
"""

import os
import shutil
import signal
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from fedring.data import digits
from fedring.train.names.offered import collect
from fedring.train.names.seam import build_model
from fedring.train.tensors.files import load_model
from fedring.workers.shards import count_steps, epoch_order
from tests.conftest import REPEATED, path_to
from tests.fault.faulty_fleet import NOTICED_WITHIN, FaultyFleet, StartedJob
from tests.fault.planned_signal import PlannedSignal, seed_that_selects, workers_and_step
from tests.fault.signalled_models import stages
from tests.fleets import Control, Fleet
from tests.reference_training import train_in_one_process

HERE = Path(__file__).parent
TRUSTED = {"trusted": ["fedring", "signalled_models"]}
SAMPLES = 701
"""Samples of an epoch: enough for four checkpoints in each, and a last step that is short."""
BATCH, PARTS, EPOCHS, WORKERS, EVERY = 16, 4, 2, 3, 10
LONG = 6  # epochs of a round that must last longer than a restart of the server
STEPS = EPOCHS * count_steps(SAMPLES, 1, BATCH)
PASSES_OF_AN_EPOCH = PARTS * (SAMPLES // BATCH) + SAMPLES % BATCH // (BATCH // PARTS)


def job(table: dict[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
    """Return a job of one round, with the keys of `table` changed in its pipeline table, and with these keys."""
    fixed = {
        "mode": "pipeline",
        "model": "signalled_models:stages",
        "epochs": EPOCHS,
        "batch_size": BATCH,
        "subset_size": SAMPLES,
        "momentum": 0.9,
        "deadline_seconds": 240,
        "pipeline": {
            "stages": WORKERS,
            "cut": ["4", "7"],
            "micro_batches": PARTS,
            "checkpoint_every": EVERY,
            **(table or {}),
        },
    }
    return {**fixed, **keys}


def fleet_of(directory: Path, clients: int = WORKERS) -> Fleet:
    """Return a fleet that has not been started."""
    return FaultyFleet(directory, TRUSTED, [TRUSTED] * clients, env=path_to(HERE))


def plan_signal(fleet: Fleet, number: int = signal.SIGKILL) -> PlannedSignal:
    """Plan a signal to one of the stages in a random micro-batch."""
    return PlannedSignal(fleet, number, passes=EPOCHS * PASSES_OF_AN_EPOCH, workers=WORKERS)


def complete_steps(passes: int) -> int:
    """Return how many steps were complete when the pass began."""
    epoch, rest = divmod(passes - 1, PASSES_OF_AN_EPOCH)
    return epoch * (STEPS // EPOCHS) + rest // PARTS


def resumptions(passes: int, every: int = EVERY) -> list[tuple[int, int]]:
    """Return the workers and steps with which a group can go on after a stage was lost in that pass.

    A stage that is lost right after the group's newest checkpoint may not have saved its part of it.
    """
    steps = complete_steps(passes)
    newest = steps // every * every
    return [(WORKERS, newest), *([(WORKERS, newest - every)] if steps == newest else [])]


def check_model(control: Control, directory: Path, spec: dict[str, Any]) -> None:
    """Assert that the newest model is what one process would have trained."""
    path, seed = directory / "model.safetensors", spec.get("seed", 0)
    control.export_model(0, path)
    model = build_model("tests.fault.signalled_models:stages", {}, seed, collect(["tests.fault.signalled_models"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=spec.get("lr", 0.05), momentum=0.9)
    samples: Any = digits().train
    orders = [
        epoch_order(len(samples), seed=seed * 1_000_003 + round_, epoch=epoch, wanted=spec["subset_size"])
        for round_, epoch in product(range(1, spec.get("rounds", 1) + 1), range(spec["epochs"]))
    ]
    given = spec["pipeline"].get("replicas", 1)
    replicas = 1 if isinstance(given, list) else given  # those of a single stage share the batches of one pipeline
    train_in_one_process(model, optimizer, samples, orders, batch=BATCH, replicas=replicas)
    for ours, theirs in zip(load_model(path, stages()).parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3)


def check_end(started: StartedJob, control: Control, folder: Path, spec: dict[str, Any]) -> None:
    """Check that the job ends with its only round published, nobody missing, and the right model."""
    started.until("job_ended")
    assert control.job(1).state == "completed"
    (round_,) = control.rounds(job_id=1)
    assert (round_.phase, list(round_.missing)) == ("published", [])
    check_model(control, folder, spec)


@pytest.mark.parametrize("repeat", REPEATED)
@pytest.mark.parametrize(("number", "every"), [(signal.SIGKILL, EVERY), (signal.SIGSTOP, EVERY), (signal.SIGKILL, 1)])
def test_a_stage_that_comes_back_goes_on_from_the_checkpoint(
    tmp_path: Path, number: int, every: int, repeat: int
) -> None:
    fleet = fleet_of(tmp_path)
    planned = plan_signal(fleet, number)
    with fleet, Control(fleet.control) as control:
        spec = job({"checkpoint_every": every})
        started = StartedJob(fleet, control, spec)
        assert workers_and_step(started.until("group_formed")) == (WORKERS, 0)
        planned.wait()
        lost = started.until("group_lost")
        assert planned.seconds_since() < NOTICED_WITHIN
        assert "generation 1 has ended" in lost.text
        del fleet.clients[planned.victim].env["FL_TEST_SIGNAL"]
        fleet.restart(planned.victim)
        assert workers_and_step(started.until("group_formed")) in resumptions(planned.step, every)
        started.until("job_ended")
        assert control.job(1).state == "completed"
        (round_,) = control.rounds(job_id=1)
        assert (round_.phase, list(round_.missing)) == ("published", [])
        assert {client.metrics["job_steps"] for client in round_.clients} == {STEPS}
        check_model(control, tmp_path, spec)


def test_a_pipeline_whose_workers_are_all_killed_goes_on_from_their_files(tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path)
    planned = plan_signal(fleet)
    with fleet, Control(fleet.control) as control:
        spec = job()
        started = StartedJob(fleet, control, spec)
        assert workers_and_step(started.until("group_formed")) == (WORKERS, 0)
        planned.wait()
        for number in {0, 1, 2} - {planned.victim}:
            os.kill(fleet.clients[number].pid, signal.SIGKILL)
        del fleet.clients[planned.victim].env["FL_TEST_SIGNAL"]
        for number in range(WORKERS):
            fleet.restart(number)
        assert workers_and_step(started.until("group_formed")) in resumptions(planned.step)
        check_end(started, control, tmp_path, spec)


@pytest.mark.soak
def test_a_worker_that_comes_back_without_its_disk_gets_its_stage_from_its_neighbour(tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path)
    planned = plan_signal(fleet)
    with fleet, Control(fleet.control) as control:
        spec = job()
        started = StartedJob(fleet, control, spec)
        assert workers_and_step(started.until("group_formed")) == (WORKERS, 0)
        planned.wait()
        started.until("group_lost")
        lost = fleet.clients[planned.victim]
        lost.wait()
        for folder in tmp_path.rglob("checkpoints"):
            if f"client-{planned.victim}" in str(folder):
                shutil.rmtree(folder)
        del lost.env["FL_TEST_SIGNAL"]
        fleet.restart(planned.victim)
        assert workers_and_step(started.until("group_formed")) in resumptions(planned.step)
        check_end(started, control, tmp_path, spec)


@pytest.mark.soak
def test_a_checkpoint_that_the_disk_has_damaged_comes_from_the_neighbour(tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path)
    planned = plan_signal(fleet)
    with fleet, Control(fleet.control) as control:
        spec = job({"checkpoint_every": 1})
        started = StartedJob(fleet, control, spec)
        assert workers_and_step(started.until("group_formed")) == (WORKERS, 0)
        planned.wait()
        started.until("group_lost")
        damaged = fleet.clients[planned.victim]
        damaged.wait()
        files = [f for f in tmp_path.rglob("*.safetensors") if f"client-{planned.victim}" in str(f)]
        for file in files:  # none, if the client was killed in its first step
            os.truncate(file, file.stat().st_size - 1)
        del damaged.env["FL_TEST_SIGNAL"]
        fleet.restart(planned.victim)
        assert workers_and_step(started.until("group_formed")) in resumptions(planned.step, 1)
        check_end(started, control, tmp_path, spec)
        assert ("is deleted: The checkpoint" in damaged.log.read_text()) == bool(files)


@pytest.mark.parametrize("repeat", REPEATED)
def test_a_pipeline_job_goes_on_by_itself_after_the_server_was_killed(tmp_path: Path, repeat: int) -> None:
    fleet = fleet_of(tmp_path)
    planned = plan_signal(fleet, 0)  # harms nobody
    with fleet, Control(fleet.control) as control:
        spec = job(rounds=2, epochs=LONG, lr=0.01)  # a larger learning rate would amplify rounding errors
        started = StartedJob(fleet, control, spec)
        assert workers_and_step(started.until("group_formed")) == (WORKERS, 0)
        planned.wait()
        fleet.restart_server()
        workers, done = workers_and_step(started.until("group_formed"))
        assert workers == WORKERS
        assert (workers, done) >= min(resumptions(planned.step))  # they may have gone on while the server was down
        assert done % EVERY == 0 or done == LONG * STEPS // EPOCHS  # at a checkpoint
        started.until("job_ended")
        assert control.job(1).state == "completed"
        rounds = control.rounds(job_id=1)
        assert [(round_.phase, list(round_.missing)) for round_ in rounds] == [("published", [])] * 2
        assert {client.metrics["job_steps"] for client in rounds[0].clients} == {2 * LONG * STEPS // EPOCHS}
        check_model(control, tmp_path, spec)


REPLICATED = {"stages": 2, "cut": ["4"], "replicas": 2}
"""Two stages with two workers each."""
EVEN_SAMPLES = SAMPLES // (2 * BATCH) * 2 * BATCH
"""Samples of an epoch whose steps all have all micro-batches."""


def plan_signal_to_replica(fleet: Fleet) -> PlannedSignal:
    """Plan SIGKILL for one of the two workers of a stage."""
    return PlannedSignal(fleet, signal.SIGKILL, passes=EPOCHS * PARTS * EVEN_SAMPLES // (2 * BATCH), workers=4)


@pytest.mark.parametrize("repeat", REPEATED)
def test_a_spare_client_takes_the_place_of_one_of_two_workers_of_a_stage(tmp_path: Path, repeat: int) -> None:
    fleet = fleet_of(tmp_path, 5)
    planned = plan_signal_to_replica(fleet)
    seed = seed_that_selects(planned.victim, 4)
    with fleet, Control(fleet.control) as control:
        spec = job(REPLICATED, subset_size=EVEN_SAMPLES, min_clients=5, seed=seed)
        started = StartedJob(fleet, control, spec)
        assert workers_and_step(started.until("group_formed")) == (4, 0)
        planned.wait()
        started.until("group_lost")
        assert planned.seconds_since() < NOTICED_WITHIN
        steps = (planned.step - 1) // PARTS
        newest = steps // EVERY * EVERY
        assert workers_and_step(started.until("group_formed")) in [(4, newest), (4, newest - EVERY * (steps == newest))]
        started.until("job_ended")
        assert control.job(1).state == "completed"
        (round_,) = control.rounds(job_id=1)
        assert (round_.phase, round_.selected, list(round_.missing)) == ("published", 5, [f"client-{planned.victim}"])
        check_model(control, tmp_path, spec)


@pytest.mark.parametrize("repeat", REPEATED)
def test_a_worker_of_a_stage_that_shares_its_batches_comes_back(tmp_path: Path, repeat: int) -> None:
    fleet = fleet_of(tmp_path, 4)
    passes = EPOCHS * PARTS // 2 * EVEN_SAMPLES // BATCH  # of a replica, which does half of the micro-batches
    planned = PlannedSignal(fleet, signal.SIGKILL, passes=passes, workers=4)
    with fleet, Control(fleet.control) as control:
        spec = job({"replicas": [1, 2, 1]}, subset_size=EVEN_SAMPLES)
        started = StartedJob(fleet, control, spec)
        assert workers_and_step(started.until("group_formed")) == (4, 0)
        planned.wait()
        started.until("group_lost")
        assert planned.seconds_since() < NOTICED_WITHIN
        del fleet.clients[planned.victim].env["FL_TEST_SIGNAL"]
        fleet.restart(planned.victim)
        steps = (planned.step - 1) // (PARTS // 2 if planned.victim in (1, 2) else PARTS)
        newest = steps // EVERY * EVERY
        assert workers_and_step(started.until("group_formed")) in [(4, newest), (4, newest - EVERY * (steps == newest))]
        check_end(started, control, tmp_path, spec)


def test_without_a_spare_client_the_job_fails_when_one_of_two_workers_of_a_stage_is_lost(tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path, 4)
    planned = plan_signal_to_replica(fleet)
    with fleet, Control(fleet.control) as control:
        table = {**REPLICATED, "replacement_seconds": 0.5}
        started = StartedJob(fleet, control, job(table, subset_size=EVEN_SAMPLES))
        planned.wait()
        started.until("group_lost")
        assert "too_few_clients" in started.until("job_ended").text
        assert control.job(1).state == "failed"
        assert control.job(1).reason.startswith("too_few_clients")


def test_a_client_that_was_not_selected_takes_the_place_of_a_lost_stage(tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path, WORKERS + 1)
    planned = plan_signal(fleet)
    seed = seed_that_selects(planned.victim, WORKERS)
    with fleet, Control(fleet.control) as control:
        # The barrier waits for all four clients, so that the seed decides who is selected.
        started = StartedJob(fleet, control, job(min_clients=WORKERS + 1, seed=seed))
        planned.wait()
        started.until("group_lost")
        assert workers_and_step(started.until("group_formed")) in resumptions(planned.step)
        started.until("job_ended")
        (round_,) = control.rounds(job_id=1)
        assert (round_.phase, round_.selected, list(round_.missing)) == (
            "published",
            WORKERS + 1,
            [f"client-{planned.victim}"],
        )


def test_without_a_replacement_the_round_is_abandoned_and_the_next_round_starts_from_the_published_model(
    tmp_path: Path,
) -> None:
    fleet = fleet_of(tmp_path)
    planned = plan_signal(fleet)
    with fleet, Control(fleet.control) as control:
        started = StartedJob(fleet, control, job({"replacement_seconds": 0.5}, rounds=2))
        planned.wait()
        assert "too_few_clients" in started.until("round_abandoned").text
        del fleet.clients[planned.victim].env["FL_TEST_SIGNAL"]
        fleet.restart(planned.victim)
        assert started.until("round_published").state.round == 2
        started.until("job_ended")
        assert control.job(1).state == "completed"
