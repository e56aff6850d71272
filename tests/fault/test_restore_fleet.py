"""Clients that train on while their server's state is reverted to an older one again and again."""

import random
import time
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import SEED, path_to
from tests.damage import ask
from tests.fault.faulty_fleet import FaultyFleet, job_end, wait_for
from tests.fault.residual_fleet import WAYS, revert_state, save_state
from tests.fleets import Control, until_watching
from tests.system.wire import WireClient, parameters, vector_job

TRUSTED = {"trusted": ["fedring", "user_trainers"]}
SIZE = 50_000
TIMES, ROUNDS = 10, 60


@pytest.mark.soak
@pytest.mark.parametrize("way", WAYS)
def test_ten_reverts_within_a_job_lose_nothing_that_was_saved(tmp_path: Path, way: str) -> None:
    """Each client adds the number of the round to every value, so the values of each version are known."""
    rng = random.Random(SEED)
    settings = {**TRUSTED, "keep_models": ROUNDS + 1, "keep_update_rounds": ROUNDS + 1}
    job = vector_job(model_args={"size": SIZE}, trainer="user_trainers:gated", min_clients=2, rounds=ROUNDS)
    with FaultyFleet(tmp_path, settings, [TRUSTED, TRUSTED], env=path_to(Path(__file__).parent)) as fleet:
        with Control(fleet.control) as control:
            until_watching(control, 2)
            job_id = control.start_job({**job, "deadline_seconds": 240}).job_id
        newest = 0
        for repeat in range(TIMES):
            wait_for_rounds(fleet, job_id, 2)
            time.sleep(rng.uniform(0, 0.2))
            save_state(fleet, way, tmp_path / f"copy-{repeat}")
            ((kept,),) = ask(tmp_path / f"copy-{repeat}", "SELECT max(version) FROM models")
            assert isinstance(kept, int)
            assert kept > newest
            newest = kept
            wait_for_rounds(fleet, job_id, 1)
            time.sleep(rng.uniform(0, 0.2))
            revert_state(fleet, way, tmp_path / f"copy-{repeat}").rename(tmp_path / f"lost-{repeat}")
            with Control(fleet.control) as control:
                assert control.models(limit=1)[0].version >= newest
        with Control(fleet.control) as control:
            job_end(fleet, control, job_id)
            ended = control.job(job_id)
            assert (ended.state, ended.rounds_done) == ("completed", ROUNDS)
            assert all(round_.delivered == 2 for round_ in control.rounds(job_id=job_id, limit=ROUNDS))
        with WireClient(fleet.listen, "reader") as reader:
            for version in range(1, ROUNDS + 2):
                values = parameters(reader, version)
                assert np.all(values == version * (version - 1) / 2), version
        assert all(client.running for client in fleet.clients)


def wait_for_rounds(fleet: FaultyFleet, job_id: int, count: int) -> None:
    """Return when `count` more rounds of the job have been published."""
    with Control(fleet.control) as control:
        events = control.follow_job(job_id)
        for _ in range(count):
            wait_for(fleet, "a round", lambda: next(event for event in events if event.kind == "round_published"))
