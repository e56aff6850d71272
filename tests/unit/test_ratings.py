"""Which model is the best, and which versions are kept."""

from dataclasses import replace
from math import nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from tests.unit.rows import a_model

from fedring.server.state.ratings import best_of, best_of_each_job, rating_in, versions_to_keep
from fedring.server.state.rows import ModelRow
from fedring.train.job import Job
from fedring.train.start import is_path, spelled, version_of


def rated(*ratings: tuple[int, float | None, float | None]) -> list[ModelRow]:
    """Return versions 1, 2, ... with these jobs, accuracies and losses."""
    return [
        replace(a_model(version), job_id=job, accuracy=accuracy, loss=loss)
        for version, (job, accuracy, loss) in enumerate(ratings, start=1)
    ]


@pytest.mark.parametrize(
    ("models", "best"),
    [
        (rated(), None),
        (rated((1, None, None)), None),
        (rated((1, 0.5, 9.0), (1, 0.7, 9.5), (1, 0.6, 0.1)), 2),  # the accuracy counts
        (rated((1, 0.7, 9.0), (1, 0.7, 0.1)), 1),  # the oldest of equals
        (rated((1, None, 3.0), (1, None, 2.0), (1, None, None)), 2),
        (rated((1, None, 0.1), (1, 0.2, 5.0)), 2),
        (rated((1, 0.0, None), (1, None, None)), 1),
    ],
)
def test_the_best_model_has_the_highest_accuracy_or_else_the_lowest_loss(
    models: list[ModelRow], best: int | None
) -> None:
    for order in (models, models[::-1]):
        found = best_of(order)
        assert (found.version if found else None) == best


def test_each_job_has_a_best_model_of_its_own() -> None:
    models = rated((1, 0.9, None), (1, 0.5, None), (2, 0.3, None), (0, 0.99, None), (3, None, None))
    assert best_of_each_job(models) == {1, 3}


@pytest.mark.parametrize(
    ("stats", "rating"),
    [
        ({}, (None, None)),
        ({"correct": 3, "total": 4, "loss_sum": 2.0, "server_accuracy": 0.1, "server_loss": 9.0}, (0.75, 0.5)),
        ({"correct": 0, "total": 0, "loss_sum": 0.0}, (None, None)),
        ({"server_accuracy": 0.25, "server_loss": 1.5}, (0.25, 1.5)),
        ({"correct": 3, "total": 4, "loss_sum": nan}, (0.75, None)),
    ],
)
def test_a_round_is_rated_by_its_clients_or_else_by_the_server(stats: dict[str, Any], rating: tuple[Any, Any]) -> None:
    assert rating_in(stats) == rating


RATINGS = st.lists(
    st.tuples(st.integers(0, 4), st.none() | st.sampled_from([0.1, 0.5, 0.9]), st.none() | st.sampled_from([1.0, 2.0])),
    max_size=12,
)


@given(RATINGS, st.integers(0, 5), st.integers(0, 3), st.sets(st.integers(1, 14), max_size=2))
def test_the_newest_versions_the_newest_and_the_best_of_each_late_job_and_what_is_used_are_kept(
    ratings: list[tuple[int, float | None, float | None]], newest: int, jobs: int, bases: set[int]
) -> None:
    models = rated(*ratings)
    kept, complete = versions_to_keep(models, newest=newest, jobs=jobs, bases=bases)
    present = {row.version for row in models}
    assert kept <= present
    assert set(sorted(present)[-max(newest, 1) :]) | bases & present <= kept
    late = sorted({row.job_id for row in models} - {0})[::-1][:jobs]
    for job in late:
        mine = [row for row in models if row.job_id == job]
        assert {max(row.version for row in mine), (best_of(mine) or mine[-1]).version} <= kept & complete
    assert len(kept) <= max(newest, 1) + 2 * len(late) + len(bases)
    assert len(complete) <= 1 + 2 * len(late)
    assert complete <= kept


@pytest.mark.parametrize(
    ("given", "one"),
    [("fresh", "fresh"), ("best", "best"), (0, "newest"), ("0", "newest"), (11, "11"), ("011", "11"), ("a/b", "a/b")],
)
def test_each_start_has_one_spelling(given: object, one: str) -> None:
    job = Job.model_validate({"start": given})
    assert job.start == one == spelled(one)
    assert Job.model_validate(job.model_dump(mode="json")) == job
    assert version_of(one) == (11 if one == "11" else 0)
    assert is_path(one) is (one == "a/b")


@pytest.mark.parametrize("wrong", ["", "frsh", -1, True, 1.5, None, [], 2**63, "9" * 40, "a\n.pt", "²"])
def test_another_start_is_refused(wrong: object) -> None:
    with pytest.raises(ValidationError, match=r"must (be|not hold)"):
        Job.model_validate({"start": wrong})
