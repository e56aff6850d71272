"""Groups whose delivering worker is killed before its update is accepted, or before it hears of the acceptance."""

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import path_to
from tests.fault.faulty_fleet import FaultyFleet, StartedJob, job_end, wait_for
from tests.fault.residual_fleet import KEPT, WAYS, revert_state, save_state, start_client
from tests.fleets import Control, until_watching

HERE = path_to(Path(__file__).parent)
TRUSTED = {"trusted": ["fedring", "signalled_models"]}
MODES: dict[str, dict[str, Any]] = {
    "data_parallel": {"model": "signalled_models:net", "data_parallel": {"replacement_seconds": 1, "bucket_mb": 0.001}},
    "pipeline": {"model": "signalled_models:stages"},
}


def job(mode: str, workers: int, rounds: int) -> dict[str, Any]:
    """Return a job of few steps, whose updates leave a residual."""
    fixed = {"encoding": "packed", "batch_size": 256, "deadline_seconds": 240, "rounds": rounds, "min_clients": workers}
    table = {"pipeline": {"stages": workers}} if mode == "pipeline" else {}
    return {"mode": mode, **fixed, **table, **MODES[mode]}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("place", ["client_update_spooled", pytest.param("client_accepted", marks=pytest.mark.soak)])
def test_a_group_whose_only_worker_is_killed_trains_an_undelivered_round_again(
    tmp_path: Path, mode: str, place: str
) -> None:
    fleet = FaultyFleet(tmp_path, TRUSTED, [TRUSTED], env=HERE)
    fleet.clients[0].env["FL_CRASH_AT"] = place
    with fleet, Control(fleet.control) as control:
        started = StartedJob(fleet, control, job(mode, workers=1, rounds=2))
        assert wait_for(fleet, f"the crash {place}", fleet.clients[0].wait) == 137
        del fleet.clients[0].env["FL_CRASH_AT"]
        start_client(fleet, 0)
        for number in (1, 2):
            assert started.until("round_published").state.round == number
        started.until("job_ended")
        assert [each.delivered for each in control.rounds(job_id=started.job_id)] == [1, 1]


def test_another_worker_delivers_the_update_of_a_pipeline_if_the_first_one_is_killed(tmp_path: Path) -> None:
    fleet = FaultyFleet(tmp_path, TRUSTED, [TRUSTED] * 3, env=HERE)
    fleet.clients[0].env["FL_CRASH_AT"] = "client_update_spooled"
    with fleet, Control(fleet.control) as control:
        keys = {"pipeline": {"stages": 3, "cut": ["4", "7"]}}
        events = control.events()
        job_id = control.start_job(job("pipeline", workers=3, rounds=1) | keys).job_id
        seen = job_end(fleet, control, job_id, events)
        assert fleet.clients[0].wait() == 137
        assert [e.text[:18] for e in seen if e.kind == "update_accepted"] == ["client-1 delivered"]
        assert "group_lost" not in {event.kind for event in seen}  # nothing was trained again
        assert control.job(job_id).state == "completed"


@pytest.mark.soak
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", WAYS)
def test_workers_that_keep_running_go_on_from_the_model_of_the_reverted_state(
    tmp_path: Path, mode: str, way: str
) -> None:
    with FaultyFleet(tmp_path, TRUSTED | KEPT, [TRUSTED, TRUSTED], env=HERE) as fleet:
        with Control(fleet.control) as control:
            until_watching(control, 2)
            started = StartedJob(fleet, control, job(mode, workers=2, rounds=6))
            for _ in range(2):
                started.until("round_published")
            save_state(fleet, way, tmp_path / "copy")
        with Control(fleet.control) as control:
            events = control.follow_job(started.job_id)
            while sum(each.phase == "published" for each in control.rounds(job_id=started.job_id)) < 4:
                wait_for(fleet, "a round", lambda: next((e for e in events if e.kind == "round_published"), None))
        revert_state(fleet, way, tmp_path / "copy")
        with Control(fleet.control) as control:
            job_end(fleet, control, started.job_id)
            assert control.job(started.job_id).state == "completed"
            rounds = control.rounds(job_id=started.job_id)
            assert [each.phase for each in rounds] == ["published"] * 6
            assert [list(each.missing) for each in rounds] == [[]] * 6
