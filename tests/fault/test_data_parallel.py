"""Data-parallel jobs on real daemons, one of which dies, freezes, stops or comes back in the middle of a step.

With FEDRING_REPEATS, tests are repeated, each time with another random step.
"""

import signal
from pathlib import Path
from typing import Any

import pytest

from fedring.v1 import control_pb2 as pb
from fedring.workers.shards import count_steps
from tests.conftest import REPEATED, path_to
from tests.fault.faulty_fleet import LOST_AFTER, NOTICED_WITHIN, SECONDS, FaultyFleet, StartedJob
from tests.fault.planned_signal import PlannedSignal, seed_that_selects, steps_left_by, workers_and_step
from tests.fleets import Control, Fleet

HERE = Path(__file__).parent
TRUSTED = {"trusted": ["fedring", "signalled_models"]}
SAMPLES, BATCH, EPOCHS, WORKERS = 1437, 32, 2, 4
STEPS = EPOCHS * count_steps(SAMPLES, WORKERS, BATCH)
SMALL_BATCH = 16
"""Of jobs that need many steps: to learn, or to go on while a process hears what a test does after one of them."""
MANY_STEPS = EPOCHS * count_steps(SAMPLES, WORKERS, SMALL_BATCH)


def job(**keys: Any) -> dict[str, Any]:
    """Return a job of one round, with these keys changed."""
    table = {"replacement_seconds": 1, "hash_every": 4, "bucket_mb": 0.001, **keys.pop("data_parallel", {})}
    fixed = {
        "mode": "data_parallel",
        "model": "signalled_models:net",
        "min_clients": WORKERS,
        "min_clients_to_aggregate": 2,
        "epochs": EPOCHS,
        "batch_size": BATCH,
        "deadline_seconds": 240,
        "data_parallel": table,
    }
    return {**fixed, **keys}


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    """Return a fleet of four workers that has not been started."""
    return FaultyFleet(tmp_path, TRUSTED, [TRUSTED] * WORKERS, env=path_to(HERE))


def plan_signal(fleet: Fleet, number: int, *, steps: int = STEPS) -> PlannedSignal:
    """Plan a signal to one of the workers in a random one of the first steps."""
    return PlannedSignal(fleet, number, passes=steps, workers=WORKERS)


def total_steps(done: int, before: int, after: int, batch: int = BATCH) -> int:
    """Return the steps of a round, the first `done` of which `before` workers take, and `after` workers the others."""
    epoch, step = divmod(done, count_steps(SAMPLES, before, batch))
    left = count_steps(SAMPLES - step * before * batch, after, batch)
    return done + left + (EPOCHS - epoch - 1) * count_steps(SAMPLES, after, batch)


def reports_of(round_: pb.Round) -> dict[str, dict[str, float]]:
    """Return what each worker has reported about its training, by client."""
    return {client.client_id: dict(client.metrics) for client in round_.clients if client.num_samples}


@pytest.mark.parametrize("repeat", REPEATED)
@pytest.mark.parametrize(("number", "hook"), [(signal.SIGKILL, "none"), (signal.SIGSTOP, "dgc")])
def test_a_lost_worker_is_noticed_and_the_others_train_to_the_end(
    fleet: Fleet, number: int, hook: str, repeat: int
) -> None:
    planned = plan_signal(fleet, number)
    with fleet, Control(fleet.control) as control:
        started = StartedJob(fleet, control, job(data_parallel={"hook": hook, "ratio": 0.05}))
        assert workers_and_step(started.until("group_formed")) == (WORKERS, 0)
        planned.wait()
        started.until("group_lost")
        assert planned.seconds_since() < NOTICED_WITHIN
        workers, done = workers_and_step(started.until("group_formed"))
        assert workers == WORKERS - 1
        assert done in steps_left_by(planned.step)
        started.until("round_published")
        fleet.clients[planned.victim].send(signal.SIGKILL)  # in case it is only frozen
        started.until("job_ended")
        assert control.job(1).state == "completed"  # so the parameters of all workers were equal
        round_ = control.rounds(job_id=1)[0]
        reports = reports_of(round_)
        assert round_.missing == [f"client-{planned.victim}"]
        assert {row["job_steps"] for row in reports.values()} == {total_steps(done, WORKERS, WORKERS - 1)}
        assert {row["workers"] for row in reports.values()} == {WORKERS - 1}


@pytest.mark.parametrize(
    "table",
    [
        {"hook": "dgc"},
        {"hook": "powersgd", "start_iteration": 2},
        {"hook": "batched_powersgd", "start_iteration": 2},
        {"hook": "topk", "ratio": 0.05},
        {"hook": "topk", "ratio": 0.05, "feedback": "ef21"},
    ],
    ids=lambda table: "-".join(map(str, table.values())),
)
def test_a_lost_worker_that_comes_back_takes_its_place_again(fleet: Fleet, table: dict[str, Any]) -> None:
    planned = plan_signal(fleet, signal.SIGKILL, steps=MANY_STEPS)
    with fleet, Control(fleet.control) as control:
        started = StartedJob(
            fleet, control, job(lr=0.1, batch_size=SMALL_BATCH, data_parallel={"replacement_seconds": 120, **table})
        )
        planned.wait()
        started.until("group_lost")
        del fleet.clients[planned.victim].env["FL_TEST_SIGNAL"]
        fleet.restart(planned.victim)
        workers, done = workers_and_step(started.until("group_formed"))
        assert workers == WORKERS
        assert done in steps_left_by(planned.step)
        started.until("job_ended")
        round_ = control.rounds(job_id=1)[0]
        assert {row["job_steps"] for row in reports_of(round_).values()} == {MANY_STEPS}
        assert round_.missing == []
        assert round_.eval_correct / round_.eval_total > 0.8


def test_a_client_that_was_not_selected_takes_the_place_of_a_lost_one(tmp_path: Path) -> None:
    fleet = FaultyFleet(tmp_path, TRUSTED, [TRUSTED] * (WORKERS + 1), env=path_to(HERE))
    planned = plan_signal(fleet, signal.SIGKILL)
    # If the victim were not selected, the job would end without a loss.
    seed = seed_that_selects(planned.victim, WORKERS)
    spec = job(min_clients=WORKERS + 1, sample_clients=WORKERS, seed=seed, data_parallel={"replacement_seconds": 120})
    with fleet, Control(fleet.control) as control:
        started = StartedJob(fleet, control, spec)
        planned.wait()
        started.until("group_lost")
        workers, done = workers_and_step(started.until("group_formed"))
        assert workers == WORKERS
        assert done in steps_left_by(planned.step)
        started.until("job_ended")
        round_ = control.rounds(job_id=1)[0]
        assert round_.selected == WORKERS + 1
        assert round_.missing == [f"client-{planned.victim}"]
        assert {row["job_steps"] for row in reports_of(round_).values()} == {STEPS}


def test_a_worker_that_is_told_to_stop_leaves_the_group_at_once(fleet: Fleet) -> None:
    planned = plan_signal(fleet, signal.SIGTERM, steps=MANY_STEPS // 2)
    with fleet, Control(fleet.control) as control:
        started = StartedJob(fleet, control, job(batch_size=SMALL_BATCH))
        planned.wait()
        started.until("group_lost")
        assert planned.seconds_since() < LOST_AFTER  # sooner than a silent worker
        assert fleet.clients[planned.victim].wait(SECONDS) == 0
        workers, done = workers_and_step(started.until("group_formed"))
        assert workers == WORKERS - 1
        assert done >= planned.step - 2  # it may have taken some more steps before its process hears of the signal
        started.until("job_ended")
        reports = reports_of(control.rounds(job_id=1)[0])
        steps = total_steps(done, WORKERS, WORKERS - 1, SMALL_BATCH)
        assert {row["job_steps"] for row in reports.values()} == {steps}


def test_a_group_trains_on_while_the_server_restarts(fleet: Fleet) -> None:
    planned = plan_signal(fleet, 0, steps=MANY_STEPS // 4)  # harms nobody
    with fleet, Control(fleet.control) as control:
        started = StartedJob(fleet, control, job(rounds=2, batch_size=SMALL_BATCH))
        started.until("group_formed")
        planned.wait()
        fleet.restart_server()
        workers, done = workers_and_step(started.until("group_formed"))
        assert workers == WORKERS
        assert done >= planned.step - 1
        started.until("job_ended")
        rounds = control.rounds(job_id=1)
        assert [round_.phase for round_ in rounds] == ["published"] * 2
        assert {row["job_steps"] for row in reports_of(rounds[0]).values()} == {2 * MANY_STEPS}
