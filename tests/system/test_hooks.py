"""Communication hooks over real groups: on two backends, with two and three workers, in one bucket and in many."""

from pathlib import Path

import pytest

from tests.system.hook_cases import BUCKETS, CASES, START, STEPS, Net, matrix
from tests.system.ring_scripts import ranks

LOSSLESS_LAW = 1e-5  # what float32 rounds away
ENTRIES = sum(parameter.numel() for parameter in Net().parameters())
HALF_LAW = 1e-2  # and what a wrapper's 16 bits do
FORGETFUL = {"fp16", "bf16", "fp16(allreduce)", "bf16(allreduce)", "int8 without feedback"}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("backend", ["gloo", "fedring"])
def test_every_hook_keeps_replicas_equal_and_near_to_the_mean_and_loses_nothing(
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


def test_the_meter_counts_the_bytes_that_a_worker_sends(tmp_path: Path) -> None:
    results = ranks.run(matrix, 2, tmp_path, backend="gloo")
    sent = {name: results[0][f"{name}, one"]["sent"] for name in ("int8", "topk", "dgc", "powersgd")}
    whole = 4 * ENTRIES  # an all-reduce of two workers sends each entry once
    assert whole / 4 < sent["int8"] < whole / 2  # the model is small: shares are filled up to whole chunks
    assert 0 < sent["topk"] < whole / 4
    assert 0 < sent["dgc"] < whole / 2
    assert START * whole / STEPS < sent["powersgd"] < whole
