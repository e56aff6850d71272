"""A simulation of secure aggregation beside real daemons: the same model, given the same secrets of the clients.

Nobody can repeat noise: its secrets, of a server, of clients and of [sample_dp], are forgotten.
"""

from pathlib import Path
from typing import Any

import pytest

from fedring.simulation import simulate
from tests.fleets import Control, Fleet, give_secrets, run_job, until_watching

CLIENTS = 5
SECRET = bytes(range(32))
JOB: dict[str, Any] = {
    "rounds": 3,
    "seed": 5,
    "model_args": {"hidden": 16},
    "subset_size": 60,
    "batch_size": 16,
    "min_clients": CLIENTS,
    "min_clients_to_aggregate": 4,
    "weights": "samples",
    "evaluate": False,
    "secure_aggregation": {"keep_ratio": 0.5, "block": 16, "step_seconds": 60},
}


@pytest.fixture(scope="module")
def model_of_daemons(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return the model file that five daemons with secrets of a simulation make."""
    folder = tmp_path_factory.mktemp("fleet")
    give_secrets(folder, CLIENTS, SECRET)
    with Fleet(folder, {}, [{"threads": 1}] * CLIENTS) as fleet, Control(fleet.control) as control:
        until_watching(control, CLIENTS)
        assert run_job(control, JOB).rounds_done == 3
        control.export_model(0, folder / "model.safetensors")
    return (folder / "model.safetensors").read_bytes()


def test_the_model_of_a_simulation_is_that_of_daemons_with_the_same_secrets_byte_for_byte(
    model_of_daemons: bytes, tmp_path: Path
) -> None:
    simulate(JOB, clients=CLIENTS, workers=1, threads=1, secret=SECRET, out=tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == model_of_daemons


def test_nobody_without_the_secrets_can_make_that_model_from_the_job_and_the_data(
    model_of_daemons: bytes, tmp_path: Path
) -> None:
    simulate(JOB, clients=CLIENTS, workers=1, threads=1, out=tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() != model_of_daemons
