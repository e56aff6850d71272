"""A round ends by its deadline, however often the server is restarted within it."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.damage import ask
from tests.fault.patience import patiently
from tests.fleets import Control, Fleet
from tests.system.wire import WireClient, deliver, outcome, vector_job

LONG = 500.0
"""Seconds of a deadline that no test waits for."""


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with Fleet(tmp_path) as fleet:
        yield fleet


@pytest.fixture
def state(fleet: Fleet) -> Path:
    return fleet.directory / "state" / "server"


def started(fleet: Fleet, **keys: Any) -> int:
    """A job that may fail once."""
    with Control(fleet.control) as control:
        return control.start_job(vector_job(max_abandoned=1, **keys)).job_id


def ended(fleet: Fleet, job_id: int) -> str:
    """Why the job has failed."""
    with Control(fleet.control) as control:
        return patiently(
            fleet, "the end of the job", lambda: outcome(control, job_id, control.follow_job(job_id))
        ).reason


def noted(fleet: Fleet, state: Path) -> float:
    """What is left of the round according to the server's next note of it."""
    ask(state, "UPDATE rounds SET seconds_left = NULL")

    def look() -> float:
        while not (notes := ask(state, "SELECT seconds_left FROM rounds WHERE seconds_left IS NOT NULL")):
            time.sleep(0.05)
        assert isinstance(notes[0][0], float)
        return notes[0][0]

    return patiently(fleet, "a note of the time that is left", look)


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"deadline_seconds": LONG}, "too_few_clients"),
        ({"barrier_timeout_seconds": LONG, "min_clients": 2}, "barrier_timeout"),
    ],
)
def test_a_restarted_round_has_what_was_left_of_its_time(
    fleet: Fleet, state: Path, keys: dict[str, Any], reason: str
) -> None:
    with WireClient(fleet.listen, "a") as client:
        job_id = started(fleet, **keys)
        if reason == "too_few_clients":
            client.expect("train")
        left = noted(fleet, state)
        assert 0 < left < LONG
        fleet.restart_server()
        assert noted(fleet, state) < left, "it goes on from there"
    fleet.server.kill()
    ask(state, "UPDATE rounds SET seconds_left = 0.2")
    fleet.start_server()
    assert ended(fleet, job_id).startswith(reason)


def test_the_grace_after_a_restart_lies_within_what_is_left(fleet: Fleet, state: Path) -> None:
    with WireClient(fleet.listen, "a") as a, WireClient(fleet.listen, "b") as b:
        job_id = started(fleet, min_clients=2, deadline_seconds=LONG)
        deliver(a)
        b.expect("train")
        fleet.server.kill()
    ask(state, "UPDATE rounds SET seconds_left = 0.2")
    began = time.monotonic()
    fleet.start_server()
    assert ended(fleet, job_id) == "", "what a delivered counts"
    assert time.monotonic() - began < 30, "b had 30 s to come back in, and no more than the round"


def test_a_server_that_is_stopped_notes_the_time_to_the_point(fleet: Fleet, state: Path) -> None:
    with WireClient(fleet.listen, "a") as client:
        started(fleet, deadline_seconds=LONG)
        client.expect("train")
        before = noted(fleet, state)
        fleet.server.send(15)
        fleet.server.wait(150)
        ((after,),) = ask(state, "SELECT seconds_left FROM rounds")
        assert isinstance(after, float)
        assert after != before


@pytest.mark.soak
def test_six_kills_give_a_round_no_more_time(fleet: Fleet) -> None:
    seconds = 12.0
    with WireClient(fleet.listen, "a") as client:
        job_id = started(fleet, deadline_seconds=seconds)
        client.expect("train")
        up = 0.0
        for _ in range(6):
            began = time.monotonic()
            time.sleep(1.8)
            fleet.server.kill()
            up += time.monotonic() - began
            fleet.start_server()
    began = time.monotonic()
    ended(fleet, job_id)
    assert up + time.monotonic() - began < 2 * seconds
