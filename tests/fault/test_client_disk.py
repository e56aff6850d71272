"""A client's disk that is full, or has flipped bits, and a folder that was copied under another name."""

import resource
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from tests import forks
from tests.fault.residual_fleet import ResidualFleet, residual_job
from tests.fault.residuals import SMALL, residual_of
from tests.fleets import Control, Fleet, until_watching

LARGE = 9e29
"""A value that no damage can be told by, but two of them are too much for an update."""


def train_once(fleet: Fleet, **keys: object) -> list[str]:
    """Run a job of one published round with the only client; return the texts of its events."""
    with Control(fleet.control) as control:
        until_watching(control, 1)
        events = control.events()
        job_id = control.start_job(residual_job(min_clients=1, rounds=1, **keys)).job_id
        texts = []
        for event in events:
            if event.job_id == job_id:
                texts.append(event.text)
                if event.kind == "job_ended":
                    break
        assert control.job(job_id).state == "completed"
    return texts


def put_into_residual(folder: Path, values: dict[int, float]) -> None:
    """Change values of a client's residual as flipped bits do."""
    path = folder / "residual.safetensors"
    with safe_open(path, "numpy") as file:
        metadata, residual = file.metadata(), file.get_tensor("residual")
    for place, value in values.items():
        residual[place] = value
    save_file({"residual": residual}, path, metadata)


@pytest.mark.parametrize("values", [{3: LARGE, 7: -LARGE}, {3: np.nan}, {3: 1e38}], ids=["long", "nan", "huge"])
def test_a_damaged_residual_costs_one_round_at_most(values: dict[int, float], tmp_path: Path) -> None:
    with ResidualFleet(tmp_path) as fleet:
        fleet.remove_gate()
        train_once(fleet)
        fleet.wait_until_known()
        fleet.kill(0)
        assert residual_of(fleet.folders[0], SMALL).any()
        put_into_residual(fleet.folders[0], values)
        fleet.clients[0].start()
        texts = train_once(fleet, max_abandoned=2)
        told = [text for text in texts if "what past updates have left out is dropped" in text]
        assert len(told) == (len(values) == 2)
        assert all("out_of_range" in text for text in told)
        assert fleet.clients[0].log.read_text().count("dropped the residual") == 1
        fleet.wait_until_known()
        assert np.abs(residual_of(fleet.folders[0], SMALL)).max() < 1e20


def test_a_disk_that_takes_no_update_is_reported_as_the_disk(tmp_path: Path) -> None:
    with ResidualFleet(tmp_path) as fleet, Control(fleet.control) as control:
        fleet.remove_gate()
        train_once(fleet)
        limit = resource.prlimit(fleet.clients[0].pid, resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))
        events = control.events()
        job_id = control.start_job(residual_job(min_clients=1, rounds=1, max_abandoned=1)).job_id
        failed = next(event.text for event in events if event.job_id == job_id and event.kind == "client_failed")
        events.cancel()
        assert "disk_failed" in failed
        resource.prlimit(fleet.clients[0].pid, resource.RLIMIT_FSIZE, limit)
        train_once(fleet)


def test_a_copied_folder_is_not_another_clients(tmp_path: Path) -> None:
    with ResidualFleet(tmp_path) as fleet:
        fleet.remove_gate()
        train_once(fleet)
        fleet.kill(0)
        words = ("--server", fleet.listen, "--client-id", "other", "--state-dir", str(fleet.folders[0]))
        ended = forks.run("fedring.client.main", *words, timeout=60)
        assert ended.returncode == 78
        assert "is that of the client client-0, and this one is other: give it a folder of its own" in ended.stderr
        fleet.clients[0].start()
        train_once(fleet)
