"""Trainings with hooks: compared with torch's own hooks, resumed, and with many local steps between exchanges."""

import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.system.hook_trainings import (
    RESUMED,
    beside_torch,
    copied_state,
    local_trainings,
    resume_checkpoints,
    resumed,
    save_checkpoints,
)
from tests.system.ring_scripts import ranks


@pytest.mark.parametrize(("backend", "size", "buckets"), [("gloo", 3, "one"), ("fedring", 2, "many")])
def test_power_sgd_trains_as_torchs_hook_does_where_that_works(
    backend: str, size: int, buckets: str, tmp_path: Path
) -> None:
    for ends in ranks.run(partial(beside_torch, buckets=buckets), size, tmp_path, backend=backend):
        for name, end in ends.items():
            assert end["apart"] < 1e-5, name
            assert end["from dense"] > 1e-5, name


@pytest.mark.parametrize("backend", ["gloo", "fedring"])
def test_resuming_from_a_checkpoint_with_other_buckets_changes_no_bit(backend: str, tmp_path: Path) -> None:
    results = ranks.run(resumed, 2, tmp_path, backend=backend)
    for name in RESUMED:
        for result in results:
            assert result[name]["resumed"] == result[name]["straight"] == results[0][name]["straight"], name
            assert result[name]["forgetful"] != result[name]["straight"], name


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3)])
def test_a_state_can_be_resumed_with_other_buckets_and_another_number_of_workers(
    before: int, after: int, tmp_path: Path
) -> None:
    residuals = ranks.run(partial(save_checkpoints, folder=str(tmp_path)), before, tmp_path / "before")
    for name in RESUMED:
        for new_rank in range(before, after):  # starts from the state of rank 0
            shutil.copy(tmp_path / f"{name} 0", tmp_path / f"{name} {new_rank}")
    results = ranks.run(partial(resume_checkpoints, folder=str(tmp_path)), after, tmp_path / "after")
    for name in RESUMED:
        first = results[0][name]
        assert all(result[name]["digest"] == first["digest"] for result in results), name
        assert all(result[name]["shared"] == first["shared"] for result in results), name
        law = 1e-2 if "(" in name else 1e-5  # a wrapper's 16 bits
        assert all(result[name]["lost"] < law for result in results), (name, first["lost"])
        assert bool(first["shared"]) == ("powersgd" in name or "ef21" in name or name == "dgc"), name
        for rank in range(min(before, after)):
            wanted = torch.tensor(residuals[rank][name]) * (after / before)
            got = torch.tensor(results[rank][name]["residual"])
            assert torch.allclose(got, wanted, rtol=1e-5) != ("ef21" in name), name  # EF21 starts new estimates
        if "ef21" in name:
            assert all(result[name]["residual"] == first["residual"] for result in results), name


def test_a_copied_state_asks_for_parameter_names_and_then_works(tmp_path: Path) -> None:
    for result in ranks.run(copied_state, 2, tmp_path):
        assert "bind(model.named_parameters())" in result["error"]
        assert result["equal"]


@pytest.mark.parametrize(("backend", "size"), [("gloo", 3), ("fedring", 2)])
def test_local_steps_end_in_equal_workers(backend: str, size: int, tmp_path: Path) -> None:
    first, *others = ranks.run(local_trainings, size, tmp_path, backend=backend)
    assert first["far from the mean"] < 1e-6
    assert all(first["apart before"])
    assert all(other["digests"] == first["digests"] for other in others)
    assert first["resumed"]
    assert 0 < first["compressed"] < 0.05
