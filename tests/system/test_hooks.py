"""Communication hooks over real groups: on two backends, with two and three workers, in one bucket and in many."""

from pathlib import Path

import pytest

from tests.system.hook_cases import BUCKETS, CASES, matrix
from tests.system.ring_scripts import ranks

LOSSLESS_LAW = 1e-5  # error of float32
HALF_LAW = 1e-2  # error of a wrapper's 16 bits
FORGETFUL = {"fp16", "bf16", "fp16(allreduce)", "bf16(allreduce)", "int8 without feedback"}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("backend", ["gloo", "fedring"])
def test_every_hook_keeps_replicas_equal_and_near_the_mean_and_loses_no_gradient(
    backend: str, size: int, tmp_path: Path
) -> None:
    results = ranks.run(matrix, size, tmp_path, backend=backend)
    for name, case in CASES.items():
        for buckets in BUCKETS:
            cell = f"{name}, {buckets}"
            assert len({result[cell]["digest"] for result in results}) == 1, cell
            assert (results[0][cell]["buckets"] > 1) == (buckets == "many"), cell
            assert results[0][cell]["off"] <= case.bound, cell
            if name not in FORGETFUL:
                assert results[0][cell]["lost"] <= (HALF_LAW if "(" in name else LOSSLESS_LAW), cell
