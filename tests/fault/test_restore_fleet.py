"""Real clients beside a server whose state is an older one now."""

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fedring.server.backup import back_up
from fedring.server.restore import restore
from tests.fault.patience import FaultyFleet, Story, patiently
from tests.fleets import Control, Fleet, until_watching
from tests.system.wire import WireClient, outcome, parameters, payload_of, run, vector_job

HERE = {"PYTHONPATH": str(Path(__file__).parent)}
TRUSTED = {"trusted": ["fedring", "user_trainers"]}
SIZE = 50_000
SEED = int(os.environ.get("FL_TEST_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 31)


def put_back(fleet: Fleet, copy: Path) -> None:
    """Restore as docs/deployment.md says: stop all, put the state back, start all without their spooled updates."""
    fleet.server.kill()
    for client in fleet.clients:
        client.kill()
        for name in ("update", "update.residual"):
            Path(client.settings["state_dir"], name).unlink(missing_ok=True)
    restore(copy, Path(fleet.server.settings["state_dir"]), replace=True)
    fleet.start_server()


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    """From what each training began."""
    return tmp_path / "notes"


@pytest.fixture
def fleet(tmp_path: Path, notes: Path) -> Iterator[Fleet]:
    """One client, that waits at a gate in each training."""
    for name in ("gate", "gate.began"):
        os.mkfifo(tmp_path / name)
    with FaultyFleet(tmp_path, TRUSTED, [TRUSTED], env={**HERE, "FL_TEST_NOTES": str(notes)}) as fleet:
        fleet.kill(0)
        fleet.clients[0].env["FL_TEST_GATE"] = str(tmp_path / "gate")
        fleet.restart(0)
        yield fleet


def test_clients_without_their_spooled_updates_go_on_from_the_restored_models(
    fleet: Fleet, notes: Path, tmp_path: Path
) -> None:
    """The client holds model 3, and spools an update of round 3, that are of no worth any more after the restore."""
    job = vector_job(model_args={"size": SIZE}, trainer="user_trainers:noted")
    gate, began = tmp_path / "gate", tmp_path / "gate.began"
    state = Path(fleet.server.settings["state_dir"])
    with Control(fleet.control) as control:
        for number in range(3):
            story = Story(fleet, control, job)
            patiently(fleet, "the training", began.read_text)
            if number == 2:
                break
            patiently(fleet, "the gate", lambda: gate.write_text("go on"))
            story.until("job_ended")
            if number == 0:
                back_up(state, tmp_path / "copy")
        fleet.server.kill()
        patiently(fleet, "the gate", lambda: gate.write_text("go on"))
        spool = Path(fleet.clients[0].settings["state_dir"], "update")
        patiently(fleet, "the spooled update", lambda: until_spooled(spool))
    put_back(fleet, tmp_path / "copy")
    with Control(fleet.control) as control:
        with WireClient(fleet.listen, "other") as other:
            job_id, events = run(control, model_args={"size": SIZE})
            command, payload = other.expect("train"), payload_of(np.full(SIZE, 100, np.float32))
            other.push(other.header(command, payload), payload)
            assert outcome(control, job_id, events).state == "completed"
        del fleet.clients[0].env["FL_TEST_GATE"]
        fleet.clients[0].start()
        Story(fleet, control, job).until("job_ended")
        assert control.rounds(limit=1)[0].phase == "published"
        with WireClient(fleet.listen, "reader") as reader:
            assert [parameters(reader, version)[0] for version in (2, 3, 4)] == [1, 101, 102]
    assert notes.read_text().split() == ["0", "1", "2", "101"]


def until_spooled(path: Path) -> None:
    """Return when the file holds an update: its first bytes are written last."""
    while not (path.exists() and any(path.read_bytes()[:8])):
        os.sched_yield()


@pytest.mark.soak
def test_ten_restores_within_a_job_lose_nothing_of_what_was_backed_up(tmp_path: Path) -> None:
    """Each client adds the number of the round, so what every model must hold is known."""
    print(f"FL_TEST_SEED={SEED}")
    rng, rounds = random.Random(SEED), 60
    settings = {**TRUSTED, "keep_models": rounds + 1}
    job = vector_job(model_args={"size": SIZE}, trainer="user_trainers:gated", min_clients=2, rounds=rounds)
    with FaultyFleet(tmp_path, settings, [TRUSTED, TRUSTED], env=HERE) as fleet:
        with Control(fleet.control) as control:
            until_watching(control, 2)
            job_id = control.start_job(job).job_id
        newest = 0
        for repeat in range(10):
            with Control(fleet.control) as control:
                events = control.follow_job(job_id)
                for _ in range(2):
                    next(event for event in events if event.kind == "round_published")
                time.sleep(rng.uniform(0, 0.2))
                manifest = back_up(Path(fleet.server.settings["state_dir"]), tmp_path / f"copy-{repeat}")
                assert manifest.newest_model > newest
                newest = manifest.newest_model
                next(event for event in events if event.kind == "round_published")
                time.sleep(rng.uniform(0, 0.2))
            put_back(fleet, tmp_path / f"copy-{repeat}")
            with Control(fleet.control) as control:
                assert control.models(limit=1)[0].version >= newest
            for client in fleet.clients:
                client.start()
        with Control(fleet.control) as control:
            ended = outcome(control, job_id, control.follow_job(job_id))
            assert (ended.state, ended.rounds_done) == ("completed", rounds)
        with WireClient(fleet.listen, "reader") as reader:
            for version in range(1, rounds + 2):
                values = parameters(reader, version)
                assert np.all(values == version * (version - 1) / 2), version
