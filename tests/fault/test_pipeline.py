"""Pipeline jobs on real daemons, one stage of which dies or freezes: the job ends as if nothing had happened.

FEDRING_FAULT_REPEATS says how often each is done, at another random step each time.
"""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedring.ctl.control import Control
from fedring.ctl.fleet import Fleet
from fedring.data import digits
from fedring.server.rounds import Phase, Round, Rules, sample
from fedring.train.files import load_model
from fedring.train.seam import build_model
from fedring.train.shards import World, count_steps, epoch_order, shares
from tests.conftest import path_to
from tests.fault.doom import Doom, began_at
from tests.fault.mortal_models import stages
from tests.fault.patience import Story

HERE = Path(__file__).parent
TRUSTED = {"trusted": ["fedring", "mortal_models"]}
REPEATS = range(int(os.environ.get("FEDRING_FAULT_REPEATS", "1")))
SAMPLES, BATCH, PARTS, EPOCHS, WORKERS, EVERY = 1437, 16, 4, 2, 3, 10
STEPS = EPOCHS * count_steps(SAMPLES, 1, BATCH)
PASSES_OF_AN_EPOCH = PARTS * (SAMPLES // BATCH) + SAMPLES % BATCH // (BATCH // PARTS)


def job(table: dict[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
    fixed = {
        "mode": "pipeline",
        "model": "mortal_models:stages",
        "epochs": EPOCHS,
        "batch_size": BATCH,
        "momentum": 0.9,
        "deadline_seconds": 120,
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
    return Fleet(directory, TRUSTED, [TRUSTED] * clients, env=path_to(HERE))


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


def check_model(control: Control, directory: Path, rounds: int = 1) -> None:
    """The newest model is what one process would have trained that was never disturbed."""
    path = directory / "model.safetensors"
    control.export_model(0, path)
    samples: Any = digits().train
    model = build_model("tests.fault.mortal_models:stages", {}, 0, ["tests"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for round_ in range(1, rounds + 1):
        for epoch in range(EPOCHS):
            for share in shares(epoch_order(SAMPLES, seed=round_, epoch=epoch), 0, World(), BATCH):
                inputs, labels = samples.batch(share.indices)
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
    for ours, theirs in zip(load_model(path, stages()).parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("repeat", REPEATS)
@pytest.mark.parametrize(("number", "every"), [(signal.SIGKILL, EVERY), (signal.SIGSTOP, EVERY), (signal.SIGKILL, 1)])
def test_a_stage_that_comes_back_goes_on_from_the_checkpoint(
    tmp_path: Path, number: int, every: int, repeat: int
) -> None:
    fleet = fleet_of(tmp_path)
    doom = doom_of(fleet, number)
    with fleet, Control(fleet.control) as control:
        story = Story(fleet, control, job({"checkpoint_every": every}))
        assert began_at(story.until("group_formed")) == (WORKERS, 0)
        doom.wait()
        lost = story.until("group_lost")
        assert doom.noticed_after() < 5
        assert "generation 1 has ended" in lost.text
        del fleet.clients[doom.victim].env["FL_TEST_FATE"]
        fleet.restart(doom.victim)
        assert began_at(story.until("group_formed")) in resumptions(doom.step, every)
        story.until("job_ended")
        assert control.job(1).state == "completed"
        (round_,) = control.rounds(job_id=1)
        assert (round_.phase, list(round_.missing)) == ("published", [])
        assert {client.metrics["job_steps"] for client in round_.clients} == {STEPS}
        check_model(control, tmp_path)


def test_a_client_that_was_not_selected_takes_the_place_of_a_lost_stage(tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path, WORKERS + 1)
    doom = doom_of(fleet)
    seed = next(seed for seed in range(100) if doom.victim in drawn(seed))
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


def drawn(seed: int) -> list[int]:
    """The clients that a job of this seed selects for the first round of a server."""
    names = [f"client-{number}" for number in range(WORKERS + 1)]
    rules = Rules(min_clients=WORKERS + 1, sample_clients=WORKERS, seed=seed)
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
