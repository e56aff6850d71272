"""Properties of every division of samples among clients."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedring.data.partition import Indices, Labels, dirichlet, iid, shards

Divide = Callable[[Labels, int, int], list[Indices]]

DIVIDERS: dict[str, Divide] = {
    "iid": lambda labels, count, seed: iid(len(labels), count, seed),
    "shards": lambda labels, count, seed: shards(labels, count, seed),
    "dirichlet": lambda labels, count, seed: dirichlet(labels, count, 0.3, seed),
    "dirichlet of nearly one class": lambda labels, count, seed: dirichlet(labels, count, 1e-9, seed),
}

labels_of_samples = st.lists(st.integers(-2, 6), max_size=60).map(lambda values: np.array(values, np.int64))
every_divider = pytest.mark.parametrize("divide", DIVIDERS.values(), ids=DIVIDERS.keys())


@every_divider
@given(labels=labels_of_samples, count=st.integers(1, 12), seed=st.integers(0, 2**64 - 1))
def test_the_parts_are_disjoint_and_complete(divide: Divide, labels: Labels, count: int, seed: int) -> None:
    parts = divide(labels, count, seed)
    assert len(parts) == count
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))
    assert all((np.diff(part) > 0).all() for part in parts)
    assert len(labels) < count or all(len(part) > 0 for part in parts)


@every_divider
@given(labels=labels_of_samples, count=st.integers(1, 12), seed=st.integers(0, 2**64 - 1))
def test_the_same_seed_gives_the_same_parts(divide: Divide, labels: Labels, count: int, seed: int) -> None:
    for mine, theirs in zip(divide(labels, count, seed), divide(labels, count, seed), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@every_divider
@pytest.mark.parametrize("other", [1, 2**32])
def test_another_seed_gives_other_parts(divide: Divide, other: int) -> None:
    labels = np.arange(500) % 10
    assert any(a.tolist() != b.tolist() for a, b in zip(divide(labels, 5, 0), divide(labels, 5, other), strict=True))


@given(count=st.integers(1, 12), n=st.integers(0, 200), seed=st.integers(0, 1000))
def test_iid_parts_differ_by_at_most_one_sample(count: int, n: int, seed: int) -> None:
    sizes = [len(part) for part in iid(n, count, seed)]
    assert max(sizes) - min(sizes) <= 1


def test_parts_are_the_same_in_every_version() -> None:
    """Clients of different versions must agree on which client holds which samples."""
    labels = np.arange(12) % 3
    assert [p.tolist() for p in iid(7, 2, 2**40)] == [[2, 4, 5, 6], [0, 1, 3]]
    assert [p.tolist() for p in shards(labels, 3, 1)] == [[0, 3, 4, 10], [1, 6, 7, 9], [2, 5, 8, 11]]
    assert [p.tolist() for p in dirichlet(labels, 3, 0.5, 1)] == [[0, 3, 6, 9], [1, 2, 5, 10], [4, 7, 8, 11]]


def test_a_client_with_two_shards_holds_few_classes() -> None:
    labels = np.arange(1000) % 10
    assert all(len(np.unique(labels[part])) <= 4 for part in shards(labels, 20, 0))
    assert all(len(part) == 50 for part in shards(labels, 20, 0))


def test_a_smaller_alpha_makes_parts_more_skewed() -> None:
    labels = np.arange(2000) % 10

    def skew(alpha: float) -> float:
        """Return the mean share of a client's most frequent class: 0.1 if all are equal, 1 if each has one class."""
        parts = [part for seed in range(5) for part in dirichlet(labels, 20, alpha, seed)]
        return float(np.mean([np.bincount(labels[part]).max() / len(part) for part in parts]))

    skews = [skew(alpha) for alpha in (0.01, 0.1, 1.0, 10.0, 1000.0)]
    assert skews == sorted(skews, reverse=True)
    assert skews[0] > 0.8
    assert skews[-1] < 0.2


def test_the_shares_of_clients_have_the_variance_of_the_dirichlet_distribution() -> None:
    """Under Dir(a p), a share has the variance p (1 - p) / (a + 1), which clients with many samples show."""
    labels, alpha = np.arange(20_000) % 2, 3.0
    shares = [labels[part].mean() for seed in range(10) for part in dirichlet(labels, 100, alpha, seed)]
    assert np.var(shares) == pytest.approx(0.25 / (alpha + 1), rel=0.25)
