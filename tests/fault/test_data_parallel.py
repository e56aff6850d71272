"""Data-parallel jobs on real daemons, one of which dies, freezes, stops or comes back in the middle of a step.

FEDRING_REPEATS says how often each is done, at another random step each time.
"""

import signal
from pathlib import Path
from typing import Any

import pytest

from fedring.server.round.events import Phase, Round, Rules
from fedring.server.round.machine import sample
from fedring.v1 import control_pb2 as pb
from fedring.workers.shards import count_steps
from tests.conftest import REPEATED, path_to
from tests.fault.doom import Doom, began_at
from tests.fault.patience import NOTICED, SECONDS, SILENCE, FaultyFleet, Story
from tests.fleets import Control, Fleet

HERE = Path(__file__).parent
TRUSTED = {"trusted": ["fedring", "mortal_models"]}
SAMPLES, BATCH, EPOCHS, WORKERS = 1437, 16, 4, 4
STEPS = EPOCHS * count_steps(SAMPLES, WORKERS, BATCH)


def job(**keys: Any) -> dict[str, Any]:
    table = {"replacement_seconds": 1, "hash_every": 10, "bucket_mb": 0.001, **keys.pop("data_parallel", {})}
    fixed = {
        "mode": "data_parallel",
        "model": "mortal_models:net",
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
    """Four workers, not started yet."""
    return FaultyFleet(tmp_path, TRUSTED, [TRUSTED] * WORKERS, env=path_to(HERE))


def doom_of(fleet: Fleet, number: int) -> Doom:
    """A signal that one of the workers will get in a random step."""
    return Doom(fleet, number, passes=STEPS, workers=WORKERS)


def steps_in_all(done: int, before: int, after: int) -> int:
    """Steps of a round whose first `done` were taken by `before` workers, and the others by `after`."""
    epoch, step = divmod(done, count_steps(SAMPLES, before, BATCH))
    left = count_steps(SAMPLES - step * before * BATCH, after, BATCH)
    return done + left + (EPOCHS - epoch - 1) * count_steps(SAMPLES, after, BATCH)


def profile(round_: pb.Round) -> dict[str, dict[str, float]]:
    """What each worker said of its work."""
    return {client.client_id: dict(client.metrics) for client in round_.clients if client.num_samples}


@pytest.mark.parametrize("repeat", REPEATED)
@pytest.mark.parametrize(("number", "hook"), [(signal.SIGKILL, "none"), (signal.SIGSTOP, "dgc")])
def test_a_lost_worker_is_noticed_and_the_others_train_to_the_end(
    fleet: Fleet, number: int, hook: str, repeat: int
) -> None:
    doom = doom_of(fleet, number)
    with fleet, Control(fleet.control) as control:
        story = Story(fleet, control, job(data_parallel={"hook": hook, "ratio": 0.05}))
        assert began_at(story.until("group_formed")) == (WORKERS, 0)
        doom.wait()
        story.until("group_lost")
        assert doom.noticed_after() < NOTICED
        workers, done = began_at(story.until("group_formed"))
        assert (workers, done) == (WORKERS - 1, doom.step - 1)
        story.until("round_published")
        fleet.clients[doom.victim].send(signal.SIGKILL)  # if it is only frozen
        story.until("job_ended")
        assert control.job(1).state == "completed"  # the server has compared the parameters of all workers
        round_ = control.rounds(job_id=1)[0]
        told = profile(round_)
        assert round_.missing == [f"client-{doom.victim}"]
        assert {row["job_steps"] for row in told.values()} == {steps_in_all(done, WORKERS, WORKERS - 1)}
        assert {row["workers"] for row in told.values()} == {WORKERS - 1}


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
    doom = doom_of(fleet, signal.SIGKILL)
    with fleet, Control(fleet.control) as control:
        story = Story(fleet, control, job(data_parallel={"replacement_seconds": 120, **table}))
        doom.wait()
        story.until("group_lost")
        del fleet.clients[doom.victim].env["FL_TEST_FATE"]
        fleet.restart(doom.victim)
        assert began_at(story.until("group_formed")) == (WORKERS, doom.step - 1)
        story.until("job_ended")
        round_ = control.rounds(job_id=1)[0]
        assert {row["job_steps"] for row in profile(round_).values()} == {STEPS}
        assert round_.missing == []
        assert round_.eval_correct / round_.eval_total > 0.8


def test_a_client_that_was_not_selected_takes_the_place_of_a_lost_one(tmp_path: Path) -> None:
    fleet = FaultyFleet(tmp_path, TRUSTED, [TRUSTED] * (WORKERS + 1), env=path_to(HERE))
    doom = doom_of(fleet, signal.SIGKILL)
    # Whoever is selected: if it is not the victim, the job ends without a loss, so the victim must be.
    selected = next(seed for seed in range(100) if doom.victim in drawn(seed))
    spec = job(
        min_clients=WORKERS + 1, sample_clients=WORKERS, seed=selected, data_parallel={"replacement_seconds": 120}
    )
    with fleet, Control(fleet.control) as control:
        story = Story(fleet, control, spec)
        doom.wait()
        story.until("group_lost")
        assert began_at(story.until("group_formed")) == (WORKERS, doom.step - 1)
        story.until("job_ended")
        round_ = control.rounds(job_id=1)[0]
        assert round_.selected == WORKERS + 1
        assert round_.missing == [f"client-{doom.victim}"]
        assert {row["job_steps"] for row in profile(round_).values()} == {STEPS}


def drawn(seed: int) -> list[int]:
    """The clients that a job of this seed selects for the first round of a server."""
    names = [f"client-{number}" for number in range(WORKERS + 1)]
    rules = Rules(min_clients=WORKERS + 1, sample_clients=WORKERS, seed=seed)
    return [names.index(name) for name in sample(names, Round(1, rules, Phase.WAITING, 0.0))]


def test_a_worker_that_is_told_to_stop_leaves_in_order(fleet: Fleet) -> None:
    doom = doom_of(fleet, signal.SIGTERM)
    with fleet, Control(fleet.control) as control:
        story = Story(fleet, control, job())
        doom.wait()
        story.until("group_lost")
        assert doom.noticed_after() < SILENCE  # sooner than one that is silent
        assert fleet.clients[doom.victim].wait(SECONDS) == 0
        workers, done = began_at(story.until("group_formed"))
        assert workers == WORKERS - 1
        assert done in (doom.step - 1, doom.step)  # it may get round to the step, or not
        story.until("job_ended")
        told = profile(control.rounds(job_id=1)[0])
        assert {row["job_steps"] for row in told.values()} == {steps_in_all(done, WORKERS, WORKERS - 1)}


def test_a_group_outlives_the_server(fleet: Fleet) -> None:
    doom = doom_of(fleet, 0)  # harms nobody
    with fleet, Control(fleet.control) as control:
        story = Story(fleet, control, job(rounds=2))
        story.until("group_formed")
        doom.wait()
        fleet.restart_server()
        workers, done = began_at(story.until("group_formed"))
        assert workers == WORKERS
        assert done >= doom.step - 1
        story.until("job_ended")
        rounds = control.rounds(job_id=1)
        assert [round_.phase for round_ in rounds] == ["published"] * 2
        assert {row["job_steps"] for row in profile(rounds[0]).values()} == {2 * STEPS}
