"""Groups of workers, of which the one that delivers for all is killed with its update in its hands."""

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import path_to
from tests.fault.owing import KEPT, WAYS, keep, put_back, start
from tests.fault.patience import FaultyFleet, Story, patiently
from tests.fleets import Control, until_watching

HERE = path_to(Path(__file__).parent)
TRUSTED = {"trusted": ["fedring", "mortal_models"]}
MODES: dict[str, dict[str, Any]] = {
    "data_parallel": {"model": "mortal_models:net", "data_parallel": {"replacement_seconds": 1, "bucket_mb": 0.001}},
    "pipeline": {"model": "mortal_models:stages"},
}


def job(mode: str, workers: int, rounds: int) -> dict[str, Any]:
    """A job of few steps, whose updates leave something out."""
    fixed = {"encoding": "packed", "batch_size": 256, "deadline_seconds": 240, "rounds": rounds, "min_clients": workers}
    table = {"pipeline": {"stages": workers}} if mode == "pipeline" else {}
    return {"mode": mode, **fixed, **table, **MODES[mode]}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("place", ["client_update_spooled", pytest.param("client_accepted", marks=pytest.mark.soak)])
def test_a_group_of_which_nobody_is_left_trains_again_what_it_had_not_delivered(
    tmp_path: Path, mode: str, place: str
) -> None:
    fleet = FaultyFleet(tmp_path, TRUSTED, [TRUSTED], env=HERE)
    fleet.clients[0].env["FL_CRASH_AT"] = place
    with fleet, Control(fleet.control) as control:
        story = Story(fleet, control, job(mode, workers=1, rounds=2))
        assert patiently(fleet, f"the crash {place}", fleet.clients[0].wait) == 137
        del fleet.clients[0].env["FL_CRASH_AT"]
        start(fleet, 0)
        for number in (1, 2):
            assert story.until("round_published").state.round == number
        story.until("job_ended")
        assert [each.delivered for each in control.rounds(job_id=story.job_id)] == [1, 1]


@pytest.mark.soak
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", WAYS)
def test_workers_that_keep_running_go_on_from_the_model_of_then(tmp_path: Path, mode: str, way: str) -> None:
    with FaultyFleet(tmp_path, TRUSTED | KEPT, [TRUSTED, TRUSTED], env=HERE) as fleet:
        with Control(fleet.control) as control:
            until_watching(control, 2)
            story = Story(fleet, control, job(mode, workers=2, rounds=6))
            for _ in range(2):
                story.until("round_published")
            keep(fleet, way, tmp_path / "copy")
        with Control(fleet.control) as control:
            events = control.follow_job(story.job_id)
            for _ in range(2):
                patiently(fleet, "a round", lambda: next(each for each in events if each.kind == "round_published"))
        put_back(fleet, way, tmp_path / "copy")
        with Control(fleet.control) as control:
            patiently(fleet, "the end of the job", lambda: list(control.follow_job(story.job_id)))
            assert control.job(story.job_id).state == "completed"
            rounds = control.rounds(job_id=story.job_id)
            assert [each.phase for each in rounds] == ["published"] * 6
            assert [list(each.missing) for each in rounds] == [[]] * 6
