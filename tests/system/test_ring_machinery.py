"""What torch builds on a group, over the ring and over Gloo: checkpoints, DTensor, pipelines, gradients, barriers."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.system.ring_scripts import machinery, ranks


@pytest.mark.parametrize(
    "body",
    [machinery.collectives_with_gradients, machinery.distributed_tensors, machinery.properties],
    ids=lambda body: body.__name__,
)
def test_results_are_the_same_as_over_gloo(body: Callable[[int, int], Any], tmp_path: Path) -> None:
    assert ranks.run(body, 2, tmp_path / "a") == ranks.run(body, 2, tmp_path / "b", backend="gloo")


@pytest.mark.parametrize("process", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_checkpoints_are_saved_in_the_background_as_over_gloo(process: bool, tmp_path: Path) -> None:
    results = []
    for backend in ("fedring", "gloo"):
        folder = tmp_path / backend
        body = partial(machinery.checkpoints, folder=str(folder / "saved"), process=process)
        results.append(ranks.run(body, 2, folder, backend=backend))
    assert results[0] == results[1]
    assert [value for _, _, value in results[0][0][0]] == [1, 2, 3]


def test_a_group_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    for errors in ranks.run(machinery.refusals, 2, tmp_path):
        assert [error["kind"] for error in errors] == ["NotSupported", "NotSupported"]


def test_a_monitored_barrier_that_all_reach(tmp_path: Path) -> None:
    assert [error["kind"] for error in ranks.run(machinery.barrier_that_all_reach, 3, tmp_path)] == ["", "", ""]


def test_a_monitored_barrier_names_the_ranks_that_are_missing(tmp_path: Path) -> None:
    first, second = ranks.run(machinery.barrier_without_rank_1, 2, tmp_path)
    assert (first["kind"], first["text"]) == (
        "CollectiveTimeout",
        "Ranks 1 failed to pass monitoredBarrier after 1000 ms",
    )
    assert second["kind"] == "CollectiveTimeout"


def test_a_monitored_barrier_refuses_other_backends(tmp_path: Path) -> None:
    errors = ranks.run(machinery.barrier_that_all_reach, 2, tmp_path, backend="gloo")
    assert all(error["kind"] == "NotSupported" for error in errors)
