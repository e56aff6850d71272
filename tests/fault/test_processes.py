"""Real daemons that are killed in the middle of a round: nothing accepted is lost, and the job goes on by itself."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedring.daemon.crash import REGISTERED
from fedring.server.config import ServerConfig
from tests import forks
from tests.conftest import path_to
from tests.fault import faulty_fleet
from tests.fault.faulty_fleet import LOST_AFTER, FaultyFleet, StartedJob, wait_for
from tests.fault.gate import Gate
from tests.fleets import Control, Fleet

HERE = Path(__file__).parent
TRUSTED = {"trusted": ["fedring", "user_trainers"]}


def job(**keys: Any) -> dict[str, Any]:
    """Return a job whose training takes no time, with these keys changed."""
    fixed = {"trainer": "user_trainers:gated", "min_clients": 2, "evaluate": False, "deadline_seconds": 240}
    return {**fixed, **keys}


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    """Make the gate at which client 1 waits."""
    return Gate(tmp_path)


@pytest.fixture
def gated(tmp_path: Path, gate: Gate) -> Iterator[Fleet]:
    """Start a fleet whose client 1 waits at the gate in each training."""
    fleet = FaultyFleet(tmp_path, TRUSTED, [TRUSTED, TRUSTED], env=path_to(HERE))
    gate.close_for(fleet.clients[1])
    with fleet:
        yield fleet


def test_a_client_killed_in_a_round_is_noticed_and_takes_part_in_the_next(gated: Fleet, gate: Gate) -> None:
    with Control(gated.control) as control:
        started = StartedJob(gated, control, job(rounds=2))
        gate.wait(gated)
        killed = time.monotonic()
        gated.kill(1, signal.SIGKILL)
        assert started.until("client_lost").client_id == "client-1"
        assert time.monotonic() - killed < LOST_AFTER  # its stream has ended: the server need not wait for heartbeats
        first = started.until("round_published").state
        assert (first.selected, first.delivered) == (2, 1)
        gate.remove_for(gated.clients[1])
        gated.restart(1)
        second = started.until("round_published").state
        assert (second.selected, second.delivered) == (2, 2)
        started.until("job_ended")
        assert control.rounds(job_id=started.job_id)[1].missing == ["client-1"]


def test_by_default_a_silent_client_is_lost_after_five_seconds() -> None:
    assert ServerConfig.model_fields["lost_after_seconds"].default == 5


def test_the_job_goes_on_after_the_server_was_killed_between_rounds(gated: Fleet, gate: Gate) -> None:
    with Control(gated.control) as control:
        started = StartedJob(gated, control, job(rounds=4, evaluate=True))
        gate.wait(gated)
        gate.let_through(gated)
        started.until("round_evaluated")
        gated.restart_server()
        for _ in range(3):
            gate.wait(gated)
            gate.let_through(gated)
        started.until("job_ended")
        assert control.job(started.job_id).state == "completed"
        rounds = control.rounds(job_id=started.job_id)
        assert [round_.phase for round_ in rounds] == ["published"] * 4
        assert [round_.delivered for round_ in rounds] == [2] * 4


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the digest of the model that three rounds make when nothing goes wrong."""
    folder = tmp_path_factory.mktemp("undisturbed")
    fleet = FaultyFleet(folder, TRUSTED, [TRUSTED, TRUSTED], env=path_to(HERE))
    with fleet, Control(fleet.control) as control:
        StartedJob(fleet, control, job(rounds=3)).until("job_ended")
        return control.models(limit=1)[0].digest


@pytest.mark.parametrize("place", sorted(REGISTERED))
def test_a_job_ends_with_the_same_model_wherever_its_server_is_killed(
    gated: Fleet, gate: Gate, undisturbed: str, place: str
) -> None:
    with Control(gated.control) as control:
        started = StartedJob(gated, control, job(rounds=3))
        gate.wait(gated)
        gate.let_through(gated)
        gate.wait(gated)  # in round 2, which cannot end before the restart
        gated.server.env["FL_CRASH_AT"] = place
        gated.restart_server()
        gate.let_through(gated)
        assert wait_for(gated, f"the crash {place}", gated.server.wait) == 137
        del gated.server.env["FL_CRASH_AT"]
        gated.start_server()
        gate.wait(gated)
        gate.let_through(gated)
        started.until("job_ended")
        assert control.job(started.job_id).state == "completed"
        assert control.models(limit=1)[0].digest == undisturbed
        delivered = [round_.delivered for round_ in control.rounds(job_id=started.job_id)]
        assert delivered == [2, 2, 2]


def test_a_server_that_is_stopped_in_a_round_resumes_it_after_its_start(gated: Fleet, gate: Gate) -> None:
    with Control(gated.control) as control:
        started = StartedJob(gated, control, job(rounds=1))
        gate.wait(gated)
        started.until("update_accepted")
        gated.server.send(signal.SIGTERM)
        assert wait_for(gated, "the server's end", gated.server.wait) == 0
        gated.start_server()
        gate.let_through(gated)
        published = started.until("round_published").state
        assert (published.round, published.delivered) == (1, 2)


def test_a_wait_that_fails_shows_the_stacks_of_the_daemons(
    gated: Fleet, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Control(gated.control) as control:
        started = StartedJob(gated, control, job(rounds=1))
        gate.wait(gated)
        monkeypatch.setattr(faulty_fleet, "SECONDS", 0.1)
        with pytest.raises(pytest.fail.Exception, match=r"(?s)round_published did not come.*in gated"):
            started.until("round_published")


def test_a_second_server_on_the_same_state_refuses_to_start(fleet: Fleet) -> None:
    state = fleet.server.settings["state_dir"]
    second = forks.run("fedring.server.main", f"state_dir={state}", "listen=127.0.0.1:0", timeout=120)
    assert second.returncode == 78
    assert f"in use by process {fleet.server.pid}" in second.stderr
