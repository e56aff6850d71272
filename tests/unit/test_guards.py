"""Guards: what a client's update counts, how long it may be, and what the round's row says of it."""

from typing import Any

import pytest

from fedring.server.model.guards import Guard, guard
from fedring.server.state.rows import UpdateRow
from fedring.train.job import Job


def updates(**norms: float) -> list[UpdateRow]:
    """One update for each name, of that norm; the first client has 1 sample, the second 2 and so on."""
    return [
        UpdateRow(1, name, "", "", (), number, 1, 1.0, norm, 1.0)
        for number, (name, norm) in enumerate(norms.items(), start=1)
    ]


def guarded(rows: list[UpdateRow], last: float = 0.0, **settings: Any) -> Guard:
    return guard(Job.model_validate(settings), rows, last)


def test_by_default_only_the_number_of_samples_is_bounded() -> None:
    rows = [*updates(a=1e6, b=1.0), UpdateRow(1, "c", "", "", (), 1 << 40, 1, 1.0, 1.0, 1.0)]
    found = guarded(rows)
    assert found.weights == {"a": 1.0, "b": 2.0, "c": 2.0**20}
    assert found.factors == {}
    assert found.stats() == {"capped": ["c"]}


def test_all_updates_can_count_the_same() -> None:
    found = guarded(updates(a=1.0, b=2.0, c=3.0), weights="uniform", max_samples=1)
    assert found.weights == {"a": 1.0, "b": 1.0, "c": 1.0}
    assert found.stats() == {}


def test_with_a_robust_rule_a_claim_of_many_samples_changes_no_update() -> None:
    rows = [*updates(a=1.0, b=1.0, c=1.0), UpdateRow(1, "d", "", "", (), 1 << 40, 1, 1.0, 1.0, 1.0)]
    settings: dict[str, Any] = {"normalize_steps": True, "batch_size": 1, "momentum": 0.0}
    by_mean = guarded(rows, **settings)
    assert by_mean.factors["c"] > 5
    by_median = guarded(rows, **settings, aggregation={"rule": "median"})
    assert by_median.factors["c"] < 4
    assert (by_mean.capped, by_median.capped) == (("d",), ())


def test_the_one_update_of_a_group_is_not_told_to_be_capped() -> None:
    assert guarded(updates(a=1.0), mode="data_parallel", max_samples=1).capped == ()


def test_updates_that_are_too_long_are_shortened() -> None:
    found = guarded(updates(a=1.0, b=8.0, c=4.0, d=0.0), update_clip=2.0)
    assert found.factors == {"b": 0.25, "c": 0.5}
    assert found.stats() == {"update_clip": 2.0, "median_norm": 1.0, "clipped": ["b", "c"]}


@pytest.mark.parametrize(
    ("last", "clip", "bound"), [(3.0, 0.0, 6.0), (0.0, 0.0, 10.0), (3.0, 4.0, 4.0), (3.0, 100.0, 6.0)]
)
def test_the_bound_follows_the_last_round_and_the_first_round_itself(last: float, clip: float, bound: float) -> None:
    rows = updates(a=1.0, b=5.0, c=1e30)
    assert guarded(rows, last, update_clip_factor=2.0, update_clip=clip).bound == bound


def test_of_two_clients_the_longer_update_does_not_choose_its_bound() -> None:
    assert guarded(updates(a=1.0, b=1e6), update_clip_factor=2.0).factors == {"b": 2e-6}
