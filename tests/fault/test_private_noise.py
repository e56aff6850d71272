"""The noise of a round is drawn once for each set of updates, whatever is killed, and nobody can draw it afterwards."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedring.control.calls import Events
from fedring.ctl.fleet import Fleet
from fedring.server.state.backup.create import back_up
from fedring.server.state.backup.restore import restore
from tests.fault.faulty_fleet import FaultyFleet, job_end, wait_for
from tests.fleets import Control
from tests.system.wire import Refused, WireClient, payload_of, vector_job

SIZE = 1000


def private_job(**keys: Any) -> dict[str, Any]:
    dp = {"noise_multiplier": 1.0, "clip": 0.5, "adaptive": False}
    fixed = {"min_clients": 2, "weights": "uniform", "deadline_seconds": 240, "start": "fresh", "dp": dp}
    return vector_job(model_args={"size": SIZE}, **fixed | keys)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[FaultyFleet]:
    with FaultyFleet(tmp_path) as fleet:
        yield fleet


def state_of(fleet: Fleet) -> Path:
    return Path(fleet.server.settings["state_dir"])


def secrets_of(fleet: Fleet) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in state_of(fleet).glob("noise-*")}


def blobs_of(fleet: Fleet) -> set[str]:
    return {path.name for path in (state_of(fleet) / "blobs").iterdir() if path.name.startswith("blake3-")}


def passed(events: Events, *, last: bool) -> bool:
    """Wait until a round is over, and the next one has begun, or the job has ended."""
    for kind in ("round_evaluated", "job_ended" if last else "round_started"):
        next(event for event in events if event.kind == kind)
    return True


@pytest.mark.parametrize("place", ["before_publish_commit", "after_publish_commit"])
def test_a_server_that_is_killed_publishes_the_noise_that_it_had_drawn(
    fleet: FaultyFleet, place: str, tmp_path: Path
) -> None:
    fleet.server.env["FL_CRASH_AT"] = place
    fleet.restart_server()
    del fleet.server.env["FL_CRASH_AT"]
    with Control(fleet.control) as control:
        with WireClient(fleet.listen, "a") as a, WireClient(fleet.listen, "b") as b:
            job_id = control.start_job(private_job()).job_id
            for client in (a, b):
                command, payload = client.expect("train"), payload_of(np.full(SIZE, 1e-3, np.float32))
                with suppress(Refused):  # the server may be dead before it answers
                    client.push(client.header(command, payload), payload)
            assert wait_for(fleet, f"the crash {place}", fleet.server.wait) == 137
        (secret,) = secrets_of(fleet).values()
        drawn = blobs_of(fleet)  # with the model that was sealed before the kill
        back_up(state_of(fleet), tmp_path / "backup")
        fleet.start_server()
        job_end(fleet, control, job_id)
        assert control.job(job_id).state == "completed"
        assert blobs_of(fleet) <= drawn
        assert control.privacy().rounds == 1
    assert secrets_of(fleet) == {}
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert tmp_path / "backup" / "facts.sqlite" in kept
    assert not [path for path in kept if secret in path.read_bytes()]


def test_a_round_that_is_abandoned_leaves_no_secret_and_costs_nothing(fleet: FaultyFleet) -> None:
    with Control(fleet.control) as control, WireClient(fleet.listen, "a") as a, WireClient(fleet.listen, "b") as b:
        events = control.events()
        job_id = control.start_job(private_job()).job_id
        a.expect("train")
        b.expect("train")
        (state_of(fleet) / "noise-0-1").write_bytes(bytes(32))  # as if its aggregation had begun
        control.stop_job(job_id)
        list(control.follow_job(job_id, events))
        assert control.privacy().rounds == 0
    assert secrets_of(fleet) == {}


def test_a_restored_server_publishes_no_second_noise_on_the_same_updates(fleet: FaultyFleet, tmp_path: Path) -> None:
    payload = payload_of(np.full(SIZE, 1e-3, np.float32))
    with Control(fleet.control) as control:
        with WireClient(fleet.listen, "a") as a, WireClient(fleet.listen, "b") as b:
            events = control.events()
            job_id = control.start_job(private_job(rounds=2)).job_id
            a.push(a.header(a.expect("train"), payload), payload)
            back_up(state_of(fleet), tmp_path / "backup")
            b.push(b.header(b.expect("train"), payload), payload)
            wait_for(fleet, "the model", lambda: next(e for e in events if e.kind == "round_published"))
        fleet.server.kill()
        restore(tmp_path / "backup", state_of(fleet), replace=True)
        fleet.start_server()
        with WireClient(fleet.listen, "a") as a, WireClient(fleet.listen, "b") as b:
            for client in (a, b):
                client.push(client.header(client.expect("train"), payload), payload)
            job_end(fleet, control, job_id)
        rounds = {round_.job_round: (round_.phase, round_.reason) for round_ in control.rounds(job_id=job_id)}
        assert rounds == {1: ("abandoned", "restored"), 2: ("published", "")}
        assert control.privacy().rounds == 1


def test_an_adaptive_clip_goes_on_where_it_was_after_a_restart(fleet: FaultyFleet) -> None:
    table = {"noise_multiplier": 0.15, "clip": 0.1}
    payload = payload_of(np.full(SIZE, 1.0, np.float32))  # far longer than the clip
    job = private_job(rounds=3, dp=table)
    with Control(fleet.control) as control:
        job_id = 0
        for number in (1, 2, 3):
            with WireClient(fleet.listen, "a") as a, WireClient(fleet.listen, "b") as b:
                events = control.events()
                job_id = job_id or control.start_job(job).job_id
                for client in (a, b):
                    client.push(client.header(client.expect("train"), payload), payload)
                wait_for(fleet, "the next round", partial(passed, events, last=number == 3))
            fleet.restart_server()
    with closing(sqlite3.connect(state_of(fleet) / "facts.sqlite")) as facts:
        clips = [clip for (clip,) in facts.execute("SELECT next_clip FROM charges ORDER BY round")]
    assert len(clips) == 3
    assert 0.1 < clips[0] < clips[1] < clips[2]
