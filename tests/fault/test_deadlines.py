"""A round ends by its deadline, however often the server is restarted meanwhile."""

import time
from pathlib import Path
from typing import Any

import pytest

from tests.damage import ask, write
from tests.fault.faulty_fleet import wait_for
from tests.fleets import Control, Fleet
from tests.system.wire import WireClient, deliver, outcome, vector_job

LONG = 500.0
"""A deadline in seconds that no test waits for."""


def start_job(fleet: Fleet, **keys: Any) -> int:
    """Start a job that ends with its first abandoned round; return its id."""
    with Control(fleet.control) as control:
        return control.start_job(vector_job(max_abandoned=1, **keys)).job_id


def wait_for_reason(fleet: Fleet, job_id: int) -> str:
    """Wait until the job has ended; return its reason, empty if it has completed."""
    with Control(fleet.control) as control:
        return wait_for(
            fleet, "the end of the job", lambda: outcome(control, job_id, control.follow_job(job_id))
        ).reason


def next_seconds_left(fleet: Fleet, state: Path) -> float:
    """Return the seconds that are left of the round, from the server's next entry in its database."""
    query = "SELECT seconds_left FROM rounds WHERE seconds_left IS NOT NULL"
    before = ask(state, query)  # this is not erased: a server that has just started may not have read it yet

    def look() -> float:
        while (entries := ask(state, query)) in ([], before):
            time.sleep(0.05)
        assert isinstance(entries[0][0], float)
        return entries[0][0]

    return wait_for(fleet, "an entry of the seconds that are left", look)


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"deadline_seconds": LONG}, "too_few_clients"),
        ({"barrier_timeout_seconds": LONG, "min_clients": 2}, "barrier_timeout"),
    ],
)
def test_a_round_has_no_more_time_after_a_restart_than_it_had_left(
    fleet: Fleet, state: Path, keys: dict[str, Any], reason: str
) -> None:
    with WireClient(fleet.listen, "a") as client:
        job_id = start_job(fleet, **keys)
        if reason == "too_few_clients":
            client.expect("train")
        left = next_seconds_left(fleet, state)
        assert 0 < left < LONG
        fleet.restart_server()
        assert next_seconds_left(fleet, state) < left, "the time goes on from there"
    fleet.server.kill()
    write(state, "UPDATE rounds SET seconds_left = 0.2")
    fleet.start_server()
    assert wait_for_reason(fleet, job_id).startswith(reason)


def test_after_a_restart_clients_are_waited_for_no_longer_than_the_round_has_left(fleet: Fleet, state: Path) -> None:
    with WireClient(fleet.listen, "a") as a, WireClient(fleet.listen, "b") as b:
        job_id = start_job(fleet, min_clients=2, deadline_seconds=LONG)
        deliver(a)
        b.expect("train")
        fleet.server.kill()
    write(state, "UPDATE rounds SET seconds_left = 0.2")
    began = time.monotonic()
    fleet.start_server()
    assert wait_for_reason(fleet, job_id) == "", "the update of a counts"
    assert time.monotonic() - began < 30, "the server waits 30 s for b, but no longer than the round"


def test_a_server_that_is_stopped_stores_the_exact_time_that_is_left(fleet: Fleet, state: Path) -> None:
    with WireClient(fleet.listen, "a") as client:
        start_job(fleet, deadline_seconds=LONG)
        client.expect("train")
        before = next_seconds_left(fleet, state)
        fleet.server.send(15)
        fleet.server.wait(150)
        ((after,),) = ask(state, "SELECT seconds_left FROM rounds")
        assert isinstance(after, float)
        assert after != before


@pytest.mark.soak
def test_a_round_gets_no_extra_time_from_six_kills(fleet: Fleet) -> None:
    seconds = 12.0
    with WireClient(fleet.listen, "a") as client:
        job_id = start_job(fleet, deadline_seconds=seconds)
        client.expect("train")
        up = 0.0
        for _ in range(6):
            began = time.monotonic()
            time.sleep(1.8)
            fleet.server.kill()
            up += time.monotonic() - began
            fleet.start_server()
    began = time.monotonic()
    wait_for_reason(fleet, job_id)
    assert up + time.monotonic() - began < 2 * seconds
