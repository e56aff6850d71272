"""Rounds with secure aggregation publish the models of an undisturbed run, bit by bit, wherever a client is killed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fedring.client.secure.participant import CRASH_POINTS
from tests.fault.faulty_fleet import FaultyFleet, job_end, wait_for
from tests.fleets import Control, give_secrets, until_watching

CLIENTS, ROUNDS = 4, 2  # in the second round, clients begin with what they have left out of the first one
JOB: dict[str, Any] = {
    "rounds": ROUNDS,
    "seed": 0,
    "min_clients": CLIENTS,
    "min_clients_to_aggregate": CLIENTS,
    "weights": "uniform",
    "subset_size": 64,
    "evaluate": False,
    "deadline_seconds": 240,
    "secure_aggregation": {"step_seconds": 120, "keep_ratio": 0.5},
}
SPOOLED = "client_update_spooled"
"""The update is on the disk, and its masks are not bound to it: it is dropped and made again."""
ACCEPTED = "client_accepted"
"""The server has the update. The client that comes back must still help to remove the masks."""


class SecureFleet(FaultyFleet):
    """A server and its clients, which run short jobs; one of them may be killed in the first round of each."""

    def __init__(self, folder: Path) -> None:
        give_secrets(folder, CLIENTS, bytes(32))
        super().__init__(folder, {}, [{"privacy": {"require_secure_aggregation": True}}] * CLIENTS)

    def run(self, places: Sequence[str]) -> list[str]:
        """Run a job for each crash point, "" for none; return the digests of the models, the newest first."""
        for place in places:
            self._run(place)
        with Control(self.control) as control:
            return [model.digest for model in control.models(limit=ROUNDS * len(places))]

    def _run(self, place: str) -> None:
        if place:
            self.clients[0].env["FL_CRASH_AT"] = place
            self.restart(0)
            del self.clients[0].env["FL_CRASH_AT"]
        with Control(self.control) as control:
            until_watching(control, CLIENTS)
            job_id = control.start_job(JOB).job_id
        if place:
            assert wait_for(self, f"the crash {place}", self.clients[0].wait) == 137
            self.clients[0].start()
        with Control(self.control) as control:
            job_end(self, control, job_id)
            assert control.job(job_id).state == "completed", control.job(job_id).reason
            assert [round_.delivered for round_ in control.rounds(job_id=job_id)] == [CLIENTS] * ROUNDS


@pytest.mark.parametrize(
    "killed",
    [
        ("client_secure_peers", "client_secure_noted", ACCEPTED),
        pytest.param((*sorted(CRASH_POINTS), SPOOLED), marks=pytest.mark.soak),
    ],
    ids=["some", "all"],
)
def test_models_are_those_of_an_undisturbed_run_wherever_a_client_is_killed(
    tmp_path: Path, killed: Sequence[str]
) -> None:
    with SecureFleet(tmp_path / "undisturbed") as fleet:
        digests = fleet.run([""] * len(killed))
    with SecureFleet(tmp_path / "disturbed") as fleet:
        assert fleet.run(killed) == digests
