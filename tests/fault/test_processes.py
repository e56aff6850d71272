"""Real daemons that are killed at the worst moment: nothing accepted is lost, and the job goes on by itself."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedring.ctl.control import Control, Events
from fedring.ctl.fleet import Fleet
from fedring.daemon.crash import REGISTERED
from fedring.v1 import control_pb2 as pb

HERE = Path(__file__).parent
TRUSTED = {"trusted": ["fedring", "user_trainers"]}


def job(**keys: Any) -> dict[str, Any]:
    """A job that takes no time to train."""
    fixed = {"trainer": "user_trainers:gated", "min_clients": 2, "evaluate": False, "deadline_seconds": 60}
    return {**fixed, **keys}


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    environment = {"PYTHONPATH": str(HERE)}
    with Fleet(tmp_path, TRUSTED, [TRUSTED, TRUSTED], env=environment) as fleet:
        yield fleet


def until(events: Iterator[pb.Event], kind: str) -> pb.Event:
    """The next event of this kind."""
    return next(event for event in events if event.kind == kind)


def follow(control: Control, spec: dict[str, Any]) -> tuple[int, Iterator[pb.Event]]:
    events: Events = control.events()
    job_id = control.start_job(spec).job_id
    return job_id, control.follow_job(job_id, events)


def test_a_client_killed_in_a_round_is_noticed_and_takes_part_in_the_next(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    for path in (gate, tmp_path / "gate.began"):
        os.mkfifo(path)
    fleet = Fleet(tmp_path, TRUSTED, [TRUSTED, TRUSTED], env={"PYTHONPATH": str(HERE)})
    fleet.clients[1].env["FL_TEST_GATE"] = str(gate)
    with fleet, Control(fleet.control) as control:
        job_id, events = follow(control, job(rounds=2))
        assert (tmp_path / "gate.began").read_text() == "began"
        killed = time.monotonic()
        fleet.kill(1, signal.SIGKILL)
        assert until(events, "client_lost").client_id == "client-1"
        assert time.monotonic() - killed < 5
        first = until(events, "round_published").state
        assert (first.selected, first.delivered) == (2, 1)
        del fleet.clients[1].env["FL_TEST_GATE"]
        fleet.restart(1)
        second = until(events, "round_published").state
        assert (second.selected, second.delivered) == (2, 2)
        until(events, "job_ended")
        assert control.rounds(job_id=job_id)[1].missing == ["client-1"]


def test_the_job_goes_on_after_the_server_was_killed_between_rounds(fleet: Fleet) -> None:
    with Control(fleet.control) as control:
        job_id, events = follow(control, job(rounds=4, evaluate=True))
        until(events, "round_evaluated")
        fleet.restart_server()
        until(events, "job_ended")
        assert control.job(job_id).state == "completed"
        rounds = control.rounds(job_id=job_id)
        assert [round_.phase for round_ in rounds] == ["published"] * 4
        assert [round_.delivered for round_ in rounds] == [2] * 4


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The digest of the model that three rounds make when nothing goes wrong."""
    folder = tmp_path_factory.mktemp("undisturbed")
    fleet = Fleet(folder, TRUSTED, [TRUSTED, TRUSTED], env={"PYTHONPATH": str(HERE)})
    with fleet, Control(fleet.control) as control:
        _, events = follow(control, job(rounds=3))
        until(events, "job_ended")
        return control.models(limit=1)[0].digest


@pytest.mark.parametrize("place", sorted(REGISTERED))
def test_a_server_killed_at_a_crash_point_ends_with_the_same_model(
    fleet: Fleet, undisturbed: bytes, place: str
) -> None:
    with Control(fleet.control) as control:
        job_id, events = follow(control, job(rounds=3))
        until(events, "round_published")
        fleet.server.env["FL_CRASH_AT"] = place
        fleet.restart_server()
        assert fleet.server.wait(60) == 137
        del fleet.server.env["FL_CRASH_AT"]
        fleet.start_server()
        until(events, "job_ended")
        assert control.job(job_id).state == "completed"
        assert control.models(limit=1)[0].digest == undisturbed
        delivered = [round_.delivered for round_ in control.rounds(job_id=job_id)]
        assert delivered == [2, 2, 2]


def test_a_server_that_is_told_to_stop_in_a_round_goes_on_with_it_later(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    for path in (gate, tmp_path / "gate.began"):
        os.mkfifo(path)
    fleet = Fleet(tmp_path, TRUSTED, [TRUSTED, TRUSTED], env={"PYTHONPATH": str(HERE)})
    fleet.clients[1].env["FL_TEST_GATE"] = str(gate)
    with fleet, Control(fleet.control) as control:
        _, events = follow(control, job(rounds=1))
        assert (tmp_path / "gate.began").read_text() == "began"
        until(events, "update_accepted")
        fleet.server.send(signal.SIGTERM)
        assert fleet.server.wait(15) == 0
        fleet.start_server()
        gate.write_text("go on")
        published = until(events, "round_published").state
        assert (published.round, published.delivered) == (1, 2)


def test_a_second_server_on_the_same_state_is_turned_away(fleet: Fleet) -> None:
    state = fleet.server.settings["state_dir"]
    command = [sys.executable, "-m", "fedring.server.main", f"state_dir={state}", "listen=127.0.0.1:0"]
    second = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert second.returncode == 78
    assert f"in use by process {fleet.server.pid}" in second.stderr
