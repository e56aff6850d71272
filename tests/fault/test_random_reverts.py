"""Clients with residuals, kills of them and of their server, and reverts of the server's state, all at random."""

import random
import threading
from pathlib import Path

import pytest

from tests.conftest import REPEATED, SEED
from tests.fault.faulty_fleet import job_end
from tests.fault.residual_fleet import WAYS, ResidualFleet, revert_state, save_state
from tests.fault.residuals import SMALL, check_rounds, notes_path, read_trainings
from tests.fleets import Control
from tests.waiting import until

FEW, MANY = 4, 30  # disturbances in `make test`, and in each repeat of `make soak`
LONGEST = 0.5  # seconds between two of them, at most
KEEP_ALL = {"keep_models": 100_000, "keep_update_rounds": 100_000}


@pytest.mark.parametrize("repeat", REPEATED)
def test_models_and_residuals_are_right_whoever_is_killed_and_whatever_is_reverted(tmp_path: Path, repeat: int) -> None:
    rng, times = random.Random(SEED + repeat), MANY if repeat else FEW
    fleet = ResidualFleet(tmp_path, clients=2, settings=KEEP_ALL)
    fleet.remove_gate()
    disturbances: list[str] = []
    with fleet:
        job_id = fleet.start_job(rounds=100_000)
        copies: list[tuple[str, Path]] = []
        lost: list[Path] = []
        for number in range(times):
            threading.Event().wait(rng.uniform(0, LONGEST))
            disturbances.append(
                what := rng.choice(["client", "server", "save", "revert"] if copies else ["save", "client"])
            )
            if what == "client":
                index = rng.randrange(2)
                fleet.kill(index)
                threading.Event().wait(rng.uniform(0, LONGEST))
                fleet.restart(index)
            elif what == "server":
                fleet.restart_server()
            elif what == "save":
                copies.append((rng.choice(WAYS), tmp_path / f"copy-{number}"))
                save_state(fleet, *copies[-1])
            else:
                lost.append(revert_state(fleet, *copies[-1]).rename(tmp_path / f"lost-{number}"))
        with Control(fleet.control) as control:
            until(lambda: control.status().HasField("job"))  # a server that has just started resumes the job soon
            control.stop_job(job_id)
            job_end(fleet, control, job_id)
        fleet.finish_job(fleet.start_job(rounds=1))  # so that the clients empty their spools
        for index in (0, 1):
            fleet.wait_until_known(index)
        fleet.server.kill()
        accepted = check_rounds(fleet.state, fleet.folders, SMALL, *lost)
        done = [len(read_trainings(notes_path(folder))) for folder in fleet.folders]
        print(f"{', '.join(disturbances)}: {accepted} updates accepted of {done} trainings")
        logs = "".join(each.log.read_text() for each in (fleet.server, *fleet.clients))
        assert "dropped the residual" not in logs
        assert "Traceback" not in logs
