"""The noise of a round is drawn once for each set of updates, whatever is killed, and nobody can draw it afterwards."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedring.ctl.fleet import Fleet
from fedring.server.state.backup.create import back_up
from tests.fault.faulty_fleet import FaultyFleet, wait_for
from tests.fleets import Control
from tests.system.wire import Refused, WireClient, payload_of, vector_job

SIZE = 1000


def private_job(**keys: Any) -> dict[str, Any]:
    dp = {"noise_multiplier": 1.0, "clip": 0.5, "adaptive": False}
    fixed = {"min_clients": 2, "weights": "uniform", "deadline_seconds": 240, "start": "fresh"}
    return vector_job(model_args={"size": SIZE}, dp=dp, **fixed | keys)


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
        wait_for(fleet, "the end of the job", lambda: list(control.follow_job(job_id)))
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
