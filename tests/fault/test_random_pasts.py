"""Clients that owe what their updates left out, kills of them and of their server, and states that are put back."""

import os
import random
import threading
from pathlib import Path

import pytest

from tests.conftest import REPEATED
from tests.fault.books import SMALL, check_rounds, has_noted, notes_of, trainings
from tests.fault.owing import WAYS, OwingFleet, owing_job
from tests.fault.patience import patiently
from tests.fleets import Control, until_watching
from tests.waiting import until

SEED = int(os.environ.get("FL_TEST_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 31)
FEW, MANY = 4, 30  # disturbances in the ordinary suite, and in each of the repeats of `make soak`
LONGEST = 0.5  # seconds from one to the next, at most
KEEP_ALL = {"keep_models": 100_000, "keep_update_rounds": 100_000}


@pytest.mark.parametrize("repeat", REPEATED)
def test_the_books_are_right_whoever_is_killed_and_whatever_is_put_back(tmp_path: Path, repeat: int) -> None:
    print(f"FL_TEST_SEED={SEED}")
    rng, times = random.Random(SEED + repeat), MANY if repeat else FEW
    fleet = OwingFleet(tmp_path, clients=2, settings=KEEP_ALL)
    fleet.open_gate()
    told: list[str] = []
    with fleet:
        job_id = begun(fleet, rounds=100_000)
        copies: list[tuple[str, Path]] = []
        lost: list[Path] = []
        for number in range(times):
            threading.Event().wait(rng.uniform(0, LONGEST))
            told.append(what := rng.choice(["client", "server", "keep", "put back"] if copies else ["keep", "client"]))
            if what == "client":
                index = rng.randrange(2)
                fleet.kill(index)
                threading.Event().wait(rng.uniform(0, LONGEST))
                fleet.restart(index)
            elif what == "server":
                fleet.restart_server()
            elif what == "keep":
                copies.append((rng.choice(WAYS), tmp_path / f"copy-{number}"))
                fleet.keep(*copies[-1])
            else:
                lost.append(fleet.put_back(*copies[-1]).rename(tmp_path / f"lost-{number}"))
        with Control(fleet.control) as control:
            until(lambda: control.status().HasField("job"))  # a server that has just started goes on with it soon
            control.stop_job(job_id)
            patiently(fleet, "the end of the job", lambda: list(control.follow_job(job_id)))
            last = begun(fleet, rounds=1)  # which brings to an end what waits in the clients' spools
            patiently(fleet, "the end of the job", lambda: list(control.follow_job(last)))
            assert control.job(last).state == "completed"
        until(lambda: all(has_noted(fleet.folders[i], fleet.state, f"client-{i}") for i in (0, 1)))
        fleet.server.kill()
        counted = check_rounds(fleet.state, fleet.folders, SMALL, *lost)
        done = [len(trainings(notes_of(folder))) for folder in fleet.folders]
        print(f"{', '.join(told)}: {counted} updates counted of {done} trainings")
        words = "".join(each.log.read_text() for each in (fleet.server, *fleet.clients))
        assert "dropped the residual" not in words
        assert "Traceback" not in words


def begun(fleet: OwingFleet, **keys: object) -> int:
    """A job of both clients, once they are here."""
    with Control(fleet.control) as control:
        until_watching(control, 2)
        return control.start_job(owing_job(min_clients=2, **keys)).job_id
