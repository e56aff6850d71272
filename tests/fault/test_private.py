"""Private tensors are those of an undisturbed run, bit by bit, wherever a client or the server is killed.

Two models take turns, so that what belongs to one is noted while the other is trained.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fedring.daemon.crash import DELIVERING
from tests.conftest import path_to
from tests.fault.faulty_fleet import FaultyFleet, job_end, wait_for
from tests.fault.residuals import has_spooled_update
from tests.fleets import Control, until_watching
from tests.kept import sections_in
from tests.waiting import until

TRUSTED = {"trusted": ["fedring", "user_models"]}
MODELS = path_to(Path(__file__).parent.parent / "system")
JOB: dict[str, Any] = {
    "model": "user_models:normed",
    "private": ["norm.*", "second.*"],
    "rounds": 1,
    "min_clients": 2,
    "encoding": "fp32_sparse",
    "subset_size": 64,
    "evaluate": False,
    "deadline_seconds": 240,
    "start": "newest",
}
BEFORE = ("client_left_spooled", "client_update_spooled")
AFTER = ("client_accepted", "client_left_placed", "client_noted")
"""The crash points at which the server has not yet accepted the update, and those at which it has."""
ON_THE_SERVER = ("after_row_commit", "before_publish_commit")
WIDTHS = (8, 12)
"""The models: each job trains the one that the job before it has not trained."""


class PersonalFleet(FaultyFleet):
    """A server and two clients that train jobs of one round, in each of which something may be killed."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, TRUSTED, [TRUSTED] * 2, env=MODELS)
        self._folders = [Path(client.settings["state_dir"]) for client in self.clients]

    def run(self, places: Sequence[str]) -> tuple[list[str], list[dict[str, bytes]]]:
        """Run a job for each crash point, "" for none.

        Returns:
            The digests of the last version of both models, and the private tensors of both clients, by file and name.
        """
        for number, place in enumerate(places):
            self._run(place, WIDTHS[number % len(WIDTHS)])
        with Control(self.control) as control:
            digests = [model.digest for model in control.models(limit=len(WIDTHS))]
        return digests, [
            {
                f"{file.name} {name}": tensor.numpy().tobytes()
                for file in folder.glob("kept-*.safetensors")
                for name, tensor in sections_in(file)["private"].tensors.items()
            }
            for folder in self._folders
        ]

    def _run(self, place: str, width: int) -> None:
        if place in (*BEFORE, *AFTER):
            self.clients[0].env["FL_CRASH_AT"] = place
            self.restart(0)
            del self.clients[0].env["FL_CRASH_AT"]
        elif place:
            self.server.env["FL_CRASH_AT"] = place
            self.restart_server()
            del self.server.env["FL_CRASH_AT"]
        with Control(self.control) as control:
            until_watching(control, 2)
            job_id = control.start_job({**JOB, "model_args": {"width": width}}).job_id
        if place in ON_THE_SERVER:
            assert wait_for(self, f"the crash {place}", self.server.wait) == 137
            self.start_server()
        elif place:
            assert wait_for(self, f"the crash {place}", self.clients[0].wait) == 137
            if place in BEFORE:
                self.clients[0].start()
        with Control(self.control) as control:
            job_end(self, control, job_id)
            assert control.job(job_id).state == "completed"
            (round_,) = control.rounds(job_id=job_id)
            assert round_.delivered == 2
        if place in AFTER:
            self.clients[0].start()
        else:
            wait_for(self, "the notes", lambda: until(lambda: not any(map(has_spooled_update, self._folders))))


@pytest.mark.parametrize(
    "killed",
    [
        (BEFORE[0], AFTER[1], ON_THE_SERVER[0]),
        pytest.param((BEFORE[1], AFTER[0], AFTER[2], ON_THE_SERVER[1]), marks=pytest.mark.soak),
    ],
)
def test_private_tensors_are_those_of_an_undisturbed_run_wherever_something_is_killed(
    tmp_path: Path, killed: Sequence[str]
) -> None:
    assert set(BEFORE + AFTER) == DELIVERING
    # After AFTER, the restarted client notes the acceptance in the next round, and must not be killed there.
    places = ["", *(each for place in killed for each in ((place, "") if place in AFTER else (place,)))]
    with PersonalFleet(tmp_path / "undisturbed") as fleet:
        digests, private = fleet.run([""] * len(places))
    assert private[0].keys() == private[1].keys()
    assert len({name.split()[0] for name in private[0]}) == len(WIDTHS)
    assert private[0] != private[1]
    with PersonalFleet(tmp_path / "disturbed") as fleet:
        assert fleet.run(places) == (digests, private)
