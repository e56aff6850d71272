"""Real daemons that are killed at the worst moment: nothing accepted is lost, and the job goes on by itself."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedring.daemon.crash import REGISTERED
from fedring.server.config import ServerConfig
from tests import forks
from tests.fault import patience
from tests.fault.patience import SILENCE, FaultyFleet, Story, patiently
from tests.fleets import Control, Fleet

HERE = Path(__file__).parent
TRUSTED = {"trusted": ["fedring", "user_trainers"]}


def job(**keys: Any) -> dict[str, Any]:
    """A job that takes no time to train."""
    fixed = {"trainer": "user_trainers:gated", "min_clients": 2, "evaluate": False, "deadline_seconds": 240}
    return {**fixed, **keys}


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    environment = {"PYTHONPATH": str(HERE)}
    with FaultyFleet(tmp_path, TRUSTED, [TRUSTED, TRUSTED], env=environment) as fleet:
        yield fleet


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """Opened by whoever writes to it; `gate.began` tells that somebody waits."""
    gate = tmp_path / "gate"
    for path in (gate, tmp_path / "gate.began"):
        os.mkfifo(path)
    return gate


@pytest.fixture
def gated(tmp_path: Path, gate: Path) -> Iterator[Fleet]:
    """A fleet whose client 1 waits at the gate in each training."""
    fleet = FaultyFleet(tmp_path, TRUSTED, [TRUSTED, TRUSTED], env={"PYTHONPATH": str(HERE)})
    fleet.clients[1].env["FL_TEST_GATE"] = str(gate)
    with fleet:
        yield fleet


def at_the_gate(fleet: Fleet, gate: Path) -> None:
    """Return when client 1 waits."""
    assert patiently(fleet, "client 1 at the gate", gate.with_name("gate.began").read_text) == "began"


def let_through(fleet: Fleet, gate: Path) -> None:
    """Client 1 goes on."""
    patiently(fleet, "the opening of the gate", lambda: gate.write_text("go on"))


def test_a_client_killed_in_a_round_is_noticed_and_takes_part_in_the_next(gated: Fleet, gate: Path) -> None:
    with Control(gated.control) as control:
        story = Story(gated, control, job(rounds=2))
        at_the_gate(gated, gate)
        killed = time.monotonic()
        gated.kill(1, signal.SIGKILL)
        assert story.until("client_lost").client_id == "client-1"
        assert time.monotonic() - killed < SILENCE  # its stream has ended: nobody waits for it to be silent so long
        first = story.until("round_published").state
        assert (first.selected, first.delivered) == (2, 1)
        del gated.clients[1].env["FL_TEST_GATE"]
        gated.restart(1)
        second = story.until("round_published").state
        assert (second.selected, second.delivered) == (2, 2)
        story.until("job_ended")
        assert control.rounds(job_id=story.job_id)[1].missing == ["client-1"]


def test_by_default_a_silent_client_is_lost_after_five_seconds() -> None:
    assert ServerConfig.model_fields["lost_after_seconds"].default == 5


def test_the_job_goes_on_after_the_server_was_killed_after_a_round(gated: Fleet, gate: Path) -> None:
    with Control(gated.control) as control:
        story = Story(gated, control, job(rounds=4, evaluate=True))
        at_the_gate(gated, gate)
        let_through(gated, gate)
        story.until("round_evaluated")
        gated.restart_server()
        for _ in range(3):
            at_the_gate(gated, gate)
            let_through(gated, gate)
        story.until("job_ended")
        assert control.job(story.job_id).state == "completed"
        rounds = control.rounds(job_id=story.job_id)
        assert [round_.phase for round_ in rounds] == ["published"] * 4
        assert [round_.delivered for round_ in rounds] == [2] * 4


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the model that three rounds make when nothing goes wrong."""
    folder = tmp_path_factory.mktemp("undisturbed")
    fleet = FaultyFleet(folder, TRUSTED, [TRUSTED, TRUSTED], env={"PYTHONPATH": str(HERE)})
    with fleet, Control(fleet.control) as control:
        Story(fleet, control, job(rounds=3)).until("job_ended")
        return control.models(limit=1)[0].digest


@pytest.mark.parametrize("place", sorted(REGISTERED))
def test_a_server_killed_at_a_crash_point_ends_with_the_same_model(
    gated: Fleet, gate: Path, undisturbed: str, place: str
) -> None:
    with Control(gated.control) as control:
        story = Story(gated, control, job(rounds=3))
        at_the_gate(gated, gate)
        let_through(gated, gate)
        at_the_gate(gated, gate)  # in round 2, which cannot end before the server is another one
        gated.server.env["FL_CRASH_AT"] = place
        gated.restart_server()
        let_through(gated, gate)
        assert patiently(gated, f"the crash {place}", gated.server.wait) == 137
        del gated.server.env["FL_CRASH_AT"]
        gated.start_server()
        at_the_gate(gated, gate)
        let_through(gated, gate)
        story.until("job_ended")
        assert control.job(story.job_id).state == "completed"
        assert control.models(limit=1)[0].digest == undisturbed
        delivered = [round_.delivered for round_ in control.rounds(job_id=story.job_id)]
        assert delivered == [2, 2, 2]


def test_a_server_that_is_told_to_stop_in_a_round_goes_on_with_it_later(gated: Fleet, gate: Path) -> None:
    with Control(gated.control) as control:
        story = Story(gated, control, job(rounds=1))
        at_the_gate(gated, gate)
        story.until("update_accepted")
        gated.server.send(signal.SIGTERM)
        assert patiently(gated, "the server's end", gated.server.wait) == 0
        gated.start_server()
        let_through(gated, gate)
        published = story.until("round_published").state
        assert (published.round, published.delivered) == (1, 2)


def test_a_wait_that_is_in_vain_ends_with_the_stacks_of_the_daemons(
    gated: Fleet, gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Control(gated.control) as control:
        story = Story(gated, control, job(rounds=1))
        at_the_gate(gated, gate)
        monkeypatch.setattr(patience, "SECONDS", 0.1)
        with pytest.raises(pytest.fail.Exception, match=r"(?s)round_published did not come.*in gated"):
            story.until("round_published")


def test_a_second_server_on_the_same_state_is_turned_away(fleet: Fleet) -> None:
    state = fleet.server.settings["state_dir"]
    second = forks.run("fedring.server.main", f"state_dir={state}", "listen=127.0.0.1:0", timeout=120)
    assert second.returncode == 78
    assert f"in use by process {fleet.server.pid}" in second.stderr
