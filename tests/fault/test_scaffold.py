"""Control variates agree wherever a client or the server is killed, and one that was lost is noticed.

The clients' own models ([personal]) are those of an undisturbed run, too.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from fedring.daemon.crash import DELIVERING
from tests.damage import ask
from tests.fault.faulty_fleet import FaultyFleet, job_end, wait_for
from tests.fault.residuals import has_spooled_update
from tests.fleets import Control, until_watching
from tests.kept import kept_file, kept_of
from tests.waiting import until

JOB: dict[str, Any] = {
    "scaffold": True,
    "personal": {"mu": 0.5},
    "momentum": 0.0,
    "weights": "uniform",
    "partition": "shards",
    "rounds": 1,
    "min_clients": 2,
    "encoding": "packed",
    "subset_size": 64,
    "evaluate": False,
    "deadline_seconds": 240,
    "start": "newest",
}
BEFORE = ("client_left_spooled", "client_update_spooled")
AFTER = ("client_accepted", "client_left_placed", "client_noted")
"""The crash points at which the server has not yet accepted the update, and those at which it has."""
ON_THE_SERVER = ("after_row_commit", "before_publish_commit")


class CorrectedFleet(FaultyFleet):
    """A server and two clients that train jobs of one round, in each of which something may be killed."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, {}, [{}] * 2)
        self.state = Path(self.server.settings["state_dir"])
        self.folders = [Path(client.settings["state_dir"]) for client in self.clients]

    def run_round(self, killed: str = "") -> None:
        """Run a job of one round, in which the first client or the server is killed at a crash point."""
        victim = self.server if killed in ON_THE_SERVER else self.clients[0]
        if killed:
            victim.env["FL_CRASH_AT"] = killed
            self.restart_server() if killed in ON_THE_SERVER else self.restart(0)
            del victim.env["FL_CRASH_AT"]
        with Control(self.control) as control:
            until_watching(control, 2)
            job_id = control.start_job(JOB).job_id
        if killed:
            assert wait_for(self, f"the crash {killed}", victim.wait) == 137
            if killed in ON_THE_SERVER:
                self.start_server()
            elif killed in BEFORE:
                self.clients[0].start()
        with Control(self.control) as control:
            job_end(self, control, job_id)
            (round_,) = control.rounds(job_id=job_id)
            assert (control.job(job_id).state, round_.delivered) == ("completed", 2)
        if killed in AFTER:
            self.clients[0].start()
        else:
            wait_for(self, "the notes", lambda: until(lambda: not any(map(has_spooled_update, self.folders))))

    def digest(self) -> str:
        """Return the digest of the newest model."""
        with Control(self.control) as control:
            return control.models(limit=1)[0].digest

    def own(self) -> tuple[list[Any], list[str]]:
        """Return the clients' control variates, and the names of the updates that have left them."""
        values, names = [], []
        for folder in self.folders:
            section = kept_of(folder, "scaffold")
            assert section is not None
            values.append(section.tensors["values"].numpy())
            names.append(section.words["left_by"])
        return values, names

    def personal(self) -> list[dict[str, bytes]]:
        """Return the clients' own models."""
        sections = [kept_of(folder, "personal") for folder in self.folders]
        return [{name: value.numpy().tobytes() for name, value in each.tensors.items()} for each in sections if each]

    def common(self) -> tuple[Any, list[str]] | None:
        """Return the server's control variate, and the names of the updates in it; None if it begins anew."""
        ((blob,),) = ask(self.state, "SELECT control_blob FROM models ORDER BY version DESC LIMIT 1")
        if not blob:
            return None
        path = next(self.state.rglob(str(blob)))
        with safe_open(path, framework="numpy") as file:
            parts = [file.get_tensor(name).reshape(-1) for name in file.offset_keys()]
            counted = json.loads(file.metadata()["counted"])
        return np.concatenate(parts), [counted[f"client-{number}"] for number in range(2)]


@pytest.mark.parametrize(
    "killed",
    [
        (BEFORE[0], AFTER[1], ON_THE_SERVER[1]),
        pytest.param((*BEFORE[1:], *AFTER, ON_THE_SERVER[0]), marks=pytest.mark.soak),
    ],
)
def test_control_variates_agree_and_are_those_of_an_undisturbed_run_wherever_something_is_killed(
    tmp_path: Path, killed: Sequence[str]
) -> None:
    assert set(BEFORE + AFTER) == DELIVERING
    # After AFTER, the restarted client notes the acceptance in the next round, and must not be killed there.
    places = ["", *(each for place in killed for each in ((place, "") if place in AFTER else (place,)))]
    with CorrectedFleet(tmp_path / "undisturbed") as fleet:
        for _ in places:
            fleet.run_round()
        expected, own, personal = fleet.digest(), fleet.own()[0], fleet.personal()
    with CorrectedFleet(tmp_path / "disturbed") as fleet:
        for place in places:
            fleet.run_round(place)
        assert fleet.digest() == expected
        values, names = fleet.own()
        np.testing.assert_array_equal(values, own)
        assert fleet.personal() == personal
        common = fleet.common()
    assert common is not None
    assert common[1] == names
    assert np.abs(common[0]).max() > 0.01
    np.testing.assert_allclose(common[0], np.mean(values, axis=0), atol=1e-5)


def test_a_control_variate_that_a_client_has_lost_or_put_back_is_noticed_and_all_begin_anew(tmp_path: Path) -> None:
    with CorrectedFleet(tmp_path) as fleet:
        fleet.run_round()
        file = kept_file(fleet.folders[0])
        assert file is not None
        older = file.read_bytes()
        fleet.run_round()
        for content in (older, None):
            assert fleet.common() is not None
            fleet.kill(0)
            file.unlink()
            if content:
                file.write_bytes(content)
            fleet.clients[0].start()
            fleet.run_round()
            assert fleet.common() is None
            fleet.run_round()
        values, names = fleet.own()
        common = fleet.common()
        assert common is not None
        assert common[1] == names
        np.testing.assert_allclose(common[0], np.mean(values, axis=0), atol=1e-5)
        assert fleet.server.log.read_text().count("begins anew, because client-0 used one") == 2
