"""Simulated clients whose training fails, in jobs with masks or noise."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from fedring.control.failure import Failure
from fedring.simulation import simulate

JOB: dict[str, Any] = {"rounds": 1, "batch_size": 16}
HERE = "user_simulation"


@pytest.fixture(autouse=True)
def _users_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "fixtures_user_code"))


WHOLE: dict[str, Any] = {
    "model": "fedring.train.models:vector",
    "model_args": {"size": 400},
    "trainer": f"{HERE}:adds_or_fails",
    "evaluate": False,
    "evaluate_on_server": False,
    "min_clients": 12,
    "rounds": 1,
}
"""Jobs whose clients add 1 to all parameters, if they do not fail."""


@pytest.mark.parametrize(
    "keys",
    [
        {"secure_aggregation": {"block": 16, "step": 0.25, "first_norm": 20.0}, "min_clients_to_aggregate": 9},
        {"dp": {"noise_multiplier": 1e-9, "clip": 100.0, "adaptive": False}},
    ],
    ids=["masks", "noise"],
)
def test_a_failure_under_masks_or_noise_changes_nothing_and_counts_in_full(
    tmp_path: Path, keys: dict[str, Any]
) -> None:
    job = {**JOB, **WHOLE, "weights": "uniform", **keys}
    (row,) = simulate(job, clients=12, workers=1, out=tmp_path)["rounds"]
    (values,) = load_file(tmp_path / "model.safetensors").values()
    assert row["clients"] == row["selected"] == 12
    failed = len(row["failures"])
    assert 0 < failed < 10
    assert all(text.startswith("client-") and "an odd sum" in text for text in row["failures"])
    np.testing.assert_allclose(values, (12 - failed) / 12, atol=1e-6)


def test_a_failure_with_noise_of_a_clients_own_adds_noise_and_is_charged() -> None:
    keys: dict[str, Any] = {"weights": "uniform", "evaluate": False, "evaluate_on_server": False}
    keys |= {"data": f"{HERE}:nines", "loss": f"{HERE}:cannot_count_to_9"}
    keys |= {"sample_dp": {"noise_multiplier": 1.0, "max_grad_norm": 0.5}}
    report = simulate({**JOB, **keys}, clients=6, workers=1)
    (row,) = report["rounds"]
    assert row["clients"] == 6
    assert len(row["failures"]) == 6
    assert report["sample_epsilon"] > 0


def test_a_client_that_fails_ten_times_in_a_row_is_left_out() -> None:
    keys = WHOLE | {"trainer": f"{HERE}:fails", "rounds": 20, "max_abandoned": 1, "weights": "uniform"}
    rows: list[dict[str, Any]] = []
    job = {**JOB, **keys, "dp": {"noise_multiplier": 1e-9, "clip": 1.0, "adaptive": False}}
    why = "client-0 has failed in 10 rounds in a row, and takes no further part"
    with pytest.raises(Failure, match=f"round 11 is abandoned, because 0 of 12 clients delivered an update: {why}"):
        simulate(job, clients=12, workers=1, show=lambda share, row: rows.extend([row] if row else []))
    assert {row["clients"] for row in rows if "reason" not in row} == {12}
