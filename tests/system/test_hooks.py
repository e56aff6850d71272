"""Communication hooks over real groups: on two backends, with two and three workers, in one bucket and in many."""

from typing import Any

import pytest

from tests.system.hook_cases import BUCKETS, CASES, MEASURED, START, Net, matrix
from tests.system.ring_scripts import ranks

LOSSLESS_LAW = 1e-5  # error of float32
HALF_LAW = 1e-2  # error of a wrapper's 16 bits
ENTRIES = sum(parameter.numel() for parameter in Net().parameters())
FORGETFUL = {"fp16", "bf16", "fp16(allreduce)", "bf16(allreduce)", "int8 without feedback"}


Results = list[dict[str, dict[str, Any]]]


@pytest.fixture(scope="module", params=[(backend, size) for backend in ("gloo", "fedring") for size in (2, 3)])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Return what each rank measured of every hook, on a backend and with some number of workers."""
    backend, size = request.param
    return ranks.run(matrix, size, tmp_path_factory.mktemp("ranks"), backend=backend)


def test_every_hook_keeps_replicas_equal_and_near_the_mean_and_loses_no_gradient(results: Results) -> None:
    for name, case in CASES.items():
        for buckets in BUCKETS:
            cell = f"{name}, {buckets}"
            assert len({result[cell]["digest"] for result in results}) == 1, cell
            assert (results[0][cell]["buckets"] > 1) == (buckets == "many"), cell
            assert results[0][cell]["off"] <= case.bound, cell
            if name not in FORGETFUL:
                assert results[0][cell]["lost"] <= (HALF_LAW if "(" in name else LOSSLESS_LAW), cell


def test_the_meter_counts_the_bytes_that_a_worker_sends(results: Results) -> None:
    sent = {name: results[0][f"{name}, one"]["sent"] for name in ("int8", "topk", "dgc", "powersgd")}
    whole = 4 * ENTRIES * 2 * (len(results) - 1) / len(results)  # of an all-reduce
    assert whole / 4 < sent["int8"] < whole / 2  # the model is small: shares are filled up to whole chunks
    assert 0 < sent["topk"] < whole / 4
    assert 0 < sent["dgc"] < whole / 2
    assert START * whole / MEASURED < sent["powersgd"] < whole
