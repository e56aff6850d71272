"""A client's disk that is full, or has flipped bits, and a folder that was copied under another name."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
from safetensors import safe_open

from fedring.client.transfer.kept import KeptFiles
from fedring.daemon.exits import Exit
from tests import forks
from tests.campaign.layer import FULL, PRELOAD, SOURCE, Page
from tests.conftest import missing
from tests.fault.faulty_fleet import SECONDS, FaultyFleet
from tests.fault.flipped_clients import KILLED
from tests.fault.residual_fleet import ResidualFleet, residual_job
from tests.fault.residuals import SMALL, has_spooled_update, residual_of
from tests.fleets import Control, Fleet, run_job, until_watching
from tests.kept import kept_file, kept_residual, sections_in
from tests.power.records import build_layer
from tests.waiting import until

LARGE = 9e29
"""A value that no damage can be told by, but two of them are too much for an update."""


class OneClient(ResidualFleet):
    """A server and a client that keeps a residual."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.remove_gate()

    def wait_until_gone(self) -> None:
        """Wait until the server has noticed that the client is dead, so that no round begins with it."""
        with Control(self.control) as control:
            until(lambda: all(client.state == "away" for client in control.clients()))


def run_round(fleet: Fleet) -> tuple[str, list[str]]:
    """Let the only client train one round; return the state of that job, and the texts of its events."""
    with Control(fleet.control) as control:
        until_watching(control, 1)
        job_id = control.start_job(residual_job(min_clients=1, rounds=1, max_abandoned=1)).job_id
        texts = []
        for event in control.events(after=1):
            if event.job_id == job_id:
                texts.append(event.text)
                if event.kind == "job_ended":
                    break
        return control.job(job_id).state, texts


def train_once(fleet: Fleet) -> None:
    """Let the only client train a round that is published."""
    state, texts = run_round(fleet)
    assert state == "completed", texts


def put_into_residual(folder: Path, values: dict[int, float]) -> None:
    """Change values of a client's residual as a client with other values would have kept them."""
    path = kept_file(folder)
    assert path is not None
    with safe_open(path, "pt") as file:
        line = file.metadata()["line"]
    sections = sections_in(path)
    residual = sections["residual"].tensors["residual"]
    for place, value in values.items():
        residual[place] = value
    KeptFiles(folder, "client-0").put(line, sections)


def test_a_residual_that_makes_an_update_too_long_costs_one_round(tmp_path: Path) -> None:
    with OneClient(tmp_path) as fleet:
        train_once(fleet)
        fleet.wait_until_known()
        fleet.kill(0)
        fleet.wait_until_gone()
        assert residual_of(fleet.folders[0], SMALL).any()
        put_into_residual(fleet.folders[0], {3: LARGE, 7: -LARGE})
        fleet.clients[0].start()
        state, texts = run_round(fleet)
        assert state == "failed"
        told = "out_of_range: a norm of 1.27e+30, beyond 1e+30; what past updates have left out is dropped"
        assert any(told in text for text in texts)
        train_once(fleet)
        assert fleet.clients[0].log.read_text().count("dropped the residual") == 1
        fleet.wait_until_known()
        assert np.abs(residual_of(fleet.folders[0], SMALL)).max() < 1e20


def test_a_residual_far_beyond_the_model_ends_before_a_training_begins_with_it(tmp_path: Path) -> None:
    keys = {"weights": "uniform", "subset_size": 64, "evaluate": False, "start": "newest", "deadline_seconds": 240}
    job = {
        "min_clients": 3,
        "min_clients_to_aggregate": 3,
        "secure_aggregation": {"step_seconds": 120, "keep_ratio": 0.5},
        **keys,
    }
    with FaultyFleet(tmp_path, {}, [{}] * 3) as fleet, Control(fleet.control) as control:
        client, folder = fleet.clients[0], Path(fleet.clients[0].settings["state_dir"])
        until_watching(control, 3)
        assert run_job(control, job).state == "completed"
        until(lambda: kept_residual(folder) is not None and not has_spooled_update(folder))
        client.kill()
        until(lambda: "client-0 is gone" in fleet.server.log.read_text())
        put_into_residual(folder, {3: LARGE})
        client.start()
        until_watching(control, 3)
        assert run_job(control, job).state == "completed"
        lines = [json.loads(line) for line in client.log.read_text().splitlines()]
        dropped = [each["text"] for each in lines if "it is far larger than the model" in each["text"]]
        losses = [each["loss"] for each in lines if each["text"] == "round 2: update accepted"]
        assert len(dropped) == 1
        assert losses[0] < 100


def test_a_disk_that_takes_no_update_is_reported_as_the_disk(tmp_path: Path) -> None:
    with OneClient(tmp_path) as fleet:
        train_once(fleet)
        limit = resource.prlimit(fleet.clients[0].pid, resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))
        state, texts = run_round(fleet)
        assert state == "failed"
        assert any("client-0 could not train: disk_failed: OSError" in text for text in texts)
        resource.prlimit(fleet.clients[0].pid, resource.RLIMIT_FSIZE, limit)
        train_once(fleet)


def test_a_client_goes_on_whose_disk_could_not_note_an_accepted_update(tmp_path: Path) -> None:
    with OneClient(tmp_path) as fleet:
        train_once(fleet)
        client = fleet.clients[0]
        fleet.kill(0)
        fleet.wait_until_gone()
        client.env["FL_CRASH_AT"] = "client_accepted"
        client.start()
        del client.env["FL_CRASH_AT"]
        train_once(fleet)
        assert client.wait(SECONDS) == KILLED
        fleet.wait_until_gone()
        client.start()
        with Control(fleet.control) as control:
            until_watching(control, 1)
        limit = resource.prlimit(client.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        state, texts = run_round(fleet)
        resource.prlimit(client.pid, resource.RLIMIT_FSIZE, limit)
        assert state == "failed"
        assert any("client-0 could not train: disk_failed" in text for text in texts)
        assert has_spooled_update(fleet.folders[0])
        train_once(fleet)
        assert client.running
        assert "the spooled update of round 2 had been accepted" in client.log.read_text()


def test_a_client_that_starts_on_a_full_disk_says_so_in_one_line(tmp_path: Path) -> None:
    if (layer := build_layer(tmp_path, SOURCE)) is None:
        missing("a C compiler for Linux, with which a layer under programs is built,")
    page = Page(tmp_path / "page", tmp_path / "state")
    page.fail(writes=FULL)
    words = ["--server", "127.0.0.1:1", "--client-id", "a", "--state-dir", str(tmp_path / "state")]
    env = {**os.environ, PRELOAD: str(layer), **page.variables}
    command = [sys.executable, "-m", "fedring.client.main", *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=SECONDS)
    assert done.returncode == Exit.FAILED, done.stderr
    assert "Traceback" not in done.stderr
    assert f"cannot start with the state folder {tmp_path / 'state'}" in done.stderr.splitlines()[-1]
    assert "No space left on device" in done.stderr


def test_a_copied_folder_is_not_another_clients(tmp_path: Path) -> None:
    with OneClient(tmp_path) as fleet:
        train_once(fleet)
        fleet.kill(0)
        words = ("--server", fleet.listen, "--client-id", "other", "--state-dir", str(fleet.folders[0]))
        ended = forks.run("fedring.client.main", *words, timeout=60)
        assert ended.returncode == 78
        assert "is that of the client client-0, and this one is other: give it a folder of its own" in ended.stderr
        fleet.clients[0].start()
        train_once(fleet)
