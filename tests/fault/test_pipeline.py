"""Pipeline jobs on real daemons, one stage of which dies or freezes: the job ends as if nothing had happened.

FEDRING_REPEATS says how often each is done, at another random step each time.
"""

import signal
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedring.data import digits
from fedring.server.round.events import Phase, Round, Rules
from fedring.server.round.machine import sample
from fedring.train.files import load_model
from fedring.train.seam import build_model
from fedring.workers.shards import World, count_steps, epoch_order, shares
from tests.conftest import REPEATED, path_to
from tests.fault.doom import Doom, began_at
from tests.fault.mortal_models import stages
from tests.fault.patience import NOTICED, FaultyFleet, Story
from tests.fleets import Control, Fleet

HERE = Path(__file__).parent
TRUSTED = {"trusted": ["fedring", "mortal_models"]}
SAMPLES, BATCH, PARTS, EPOCHS, WORKERS, EVERY = 1437, 16, 4, 2, 3, 10
LONG = 4  # epochs of a round that is to outlast a restart of the server
STEPS = EPOCHS * count_steps(SAMPLES, 1, BATCH)
PASSES_OF_AN_EPOCH = PARTS * (SAMPLES // BATCH) + SAMPLES % BATCH // (BATCH // PARTS)


def job(table: dict[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
    fixed = {
        "mode": "pipeline",
        "model": "mortal_models:stages",
        "epochs": EPOCHS,
        "batch_size": BATCH,
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
    """Not started yet."""
    return FaultyFleet(directory, TRUSTED, [TRUSTED] * clients, env=path_to(HERE))


def doom_of(fleet: Fleet, number: int = signal.SIGKILL) -> Doom:
    """A signal that one of the stages will get in a random micro-batch."""
    return Doom(fleet, number, passes=EPOCHS * PASSES_OF_AN_EPOCH, workers=WORKERS)


def whole_steps(passes: int) -> int:
    """Steps that were over when the pass began."""
    epoch, rest = divmod(passes - 1, PASSES_OF_AN_EPOCH)
    return epoch * (STEPS // EPOCHS) + rest // PARTS


def resumptions(passes: int, every: int = EVERY) -> list[tuple[int, int]]:
    """Where a group can go on after a stage was lost in that pass: right after a checkpoint, its own may be the only
    one that is whole.
    """
    steps = whole_steps(passes)
    newest = steps // every * every
    return [(WORKERS, newest), *([(WORKERS, newest - every)] if steps == newest else [])]


def check_model(control: Control, directory: Path, spec: dict[str, Any]) -> None:
    """The newest model is what one process would have trained that was never disturbed."""
    path, seed = directory / "model.safetensors", spec.get("seed", 0)
    control.export_model(0, path)
    samples: Any = digits().train
    model = build_model("tests.fault.mortal_models:stages", {}, seed, ["tests"])
    optimizer = torch.optim.SGD(model.parameters(), lr=spec.get("lr", 0.05), momentum=0.9)
    for round_, epoch in product(range(1, spec.get("rounds", 1) + 1), range(spec["epochs"])):
        order = epoch_order(
            SAMPLES, seed=seed * 1_000_003 + round_, epoch=epoch, wanted=spec.get("subset_size", SAMPLES)
        )
        replicas = spec["pipeline"].get("replicas", 1)
        ranks = [shares(order, 0, World(rank, replicas), BATCH) for rank in range(replicas)]
        for parts in zip(*ranks, strict=True):
            inputs, labels = samples.batch(torch.cat([share.indices for share in parts]))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    for ours, theirs in zip(load_model(path, stages()).parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("repeat", REPEATED)
@pytest.mark.parametrize(("number", "every"), [(signal.SIGKILL, EVERY), (signal.SIGSTOP, EVERY), (signal.SIGKILL, 1)])
def test_a_stage_that_comes_back_goes_on_from_the_checkpoint(
    tmp_path: Path, number: int, every: int, repeat: int
) -> None:
    fleet = fleet_of(tmp_path)
    doom = doom_of(fleet, number)
    with fleet, Control(fleet.control) as control:
        spec = job({"checkpoint_every": every})
        story = Story(fleet, control, spec)
        assert began_at(story.until("group_formed")) == (WORKERS, 0)
        doom.wait()
        lost = story.until("group_lost")
        assert doom.noticed_after() < NOTICED
        assert "generation 1 has ended" in lost.text
        del fleet.clients[doom.victim].env["FL_TEST_FATE"]
        fleet.restart(doom.victim)
        assert began_at(story.until("group_formed")) in resumptions(doom.step, every)
        story.until("job_ended")
        assert control.job(1).state == "completed"
        (round_,) = control.rounds(job_id=1)
        assert (round_.phase, list(round_.missing)) == ("published", [])
        assert {client.metrics["job_steps"] for client in round_.clients} == {STEPS}
        check_model(control, tmp_path, spec)


@pytest.mark.parametrize("repeat", REPEATED)
def test_the_job_goes_on_by_itself_when_the_server_was_killed_and_is_back(tmp_path: Path, repeat: int) -> None:
    fleet = fleet_of(tmp_path)
    doom = doom_of(fleet, 0)  # harms nobody
    with fleet, Control(fleet.control) as control:
        spec = job(rounds=2, epochs=LONG, lr=0.01)  # a larger one would make much of the last bits
        story = Story(fleet, control, spec)
        assert began_at(story.until("group_formed")) == (WORKERS, 0)
        doom.wait()
        fleet.restart_server()
        workers, done = began_at(story.until("group_formed"))
        assert workers == WORKERS
        assert (workers, done) >= min(resumptions(doom.step))  # they went on in the meantime
        assert done % EVERY == 0 or done == LONG * STEPS // EPOCHS  # but from a checkpoint
        story.until("job_ended")
        assert control.job(1).state == "completed"
        rounds = control.rounds(job_id=1)
        assert [(round_.phase, list(round_.missing)) for round_ in rounds] == [("published", [])] * 2
        assert {client.metrics["job_steps"] for client in rounds[0].clients} == {2 * LONG * STEPS // EPOCHS}
        check_model(control, tmp_path, spec)


TWICE = {"stages": 2, "cut": ["4"], "replicas": 2}
"""Four workers, two of each stage."""
WHOLE = SAMPLES // (2 * BATCH) * 2 * BATCH
"""Samples of an epoch all of whose steps have all micro-batches."""


def doom_of_one_of_two(fleet: Fleet) -> Doom:
    """SIGKILL for a worker of a stage that another one has as well."""
    return Doom(fleet, signal.SIGKILL, passes=EPOCHS * PARTS * WHOLE // (2 * BATCH), workers=4)


@pytest.mark.parametrize("repeat", REPEATED)
def test_a_spare_client_takes_the_place_of_one_of_two_workers_of_a_stage(tmp_path: Path, repeat: int) -> None:
    fleet = fleet_of(tmp_path, 5)
    doom = doom_of_one_of_two(fleet)
    seed = next(seed for seed in range(100) if doom.victim in drawn(seed, 4))
    with fleet, Control(fleet.control) as control:
        spec = job(TWICE, subset_size=WHOLE, min_clients=5, seed=seed)
        story = Story(fleet, control, spec)
        assert began_at(story.until("group_formed")) == (4, 0)
        doom.wait()
        story.until("group_lost")
        assert doom.noticed_after() < NOTICED
        steps = (doom.step - 1) // PARTS
        newest = steps // EVERY * EVERY
        assert began_at(story.until("group_formed")) in [(4, newest), (4, newest - EVERY * (steps == newest))]
        story.until("job_ended")
        assert control.job(1).state == "completed"
        (round_,) = control.rounds(job_id=1)
        assert (round_.phase, round_.selected, list(round_.missing)) == ("published", 5, [f"client-{doom.victim}"])
        check_model(control, tmp_path, spec)


def test_without_a_spare_the_loss_of_one_of_two_workers_of_a_stage_ends_the_job_with_a_reason(tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path, 4)
    doom = doom_of_one_of_two(fleet)
    with fleet, Control(fleet.control) as control:
        table = {**TWICE, "replacement_seconds": 0.5}
        story = Story(fleet, control, job(table, subset_size=WHOLE))
        doom.wait()
        story.until("group_lost")
        assert "too_few_clients" in story.until("job_ended").text
        assert control.job(1).state == "failed"
        assert control.job(1).reason.startswith("too_few_clients")


def test_a_client_that_was_not_selected_takes_the_place_of_a_lost_stage(tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path, WORKERS + 1)
    doom = doom_of(fleet)
    seed = next(seed for seed in range(100) if doom.victim in drawn(seed, WORKERS))
    with fleet, Control(fleet.control) as control:
        # Without the spare client, the others' turn would come first: the barrier waits for all four.
        story = Story(fleet, control, job(min_clients=WORKERS + 1, seed=seed))
        doom.wait()
        story.until("group_lost")
        assert began_at(story.until("group_formed")) in resumptions(doom.step)
        story.until("job_ended")
        (round_,) = control.rounds(job_id=1)
        assert (round_.phase, round_.selected, list(round_.missing)) == (
            "published",
            WORKERS + 1,
            [f"client-{doom.victim}"],
        )


def drawn(seed: int, workers: int) -> list[int]:
    """The clients, but for one, that a job of this seed selects for the first round of a server."""
    names = [f"client-{number}" for number in range(workers + 1)]
    rules = Rules(min_clients=workers + 1, sample_clients=workers, seed=seed)
    return [names.index(name) for name in sample(names, Round(1, rules, Phase.WAITING, 0.0))]


def test_without_a_replacement_the_round_is_abandoned_and_the_next_one_begins_with_the_published_model(
    tmp_path: Path,
) -> None:
    fleet = fleet_of(tmp_path)
    doom = doom_of(fleet)
    with fleet, Control(fleet.control) as control:
        story = Story(fleet, control, job({"replacement_seconds": 0.5}, rounds=2))
        doom.wait()
        assert "too_few_clients" in story.until("round_abandoned").text
        del fleet.clients[doom.victim].env["FL_TEST_FATE"]
        fleet.restart(doom.victim)
        assert story.until("round_published").state.round == 2
        story.until("job_ended")
        assert control.job(1).state == "completed"
