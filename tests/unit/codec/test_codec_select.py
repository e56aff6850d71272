"""`largest` is exact for any values."""

import numpy as np
import pytest
from numpy.typing import NDArray

from fedring.codec.select import largest


def by_sorting(values: NDArray[np.float32], count: int) -> list[int]:
    """Return what `largest` must return."""
    order = np.argsort(-np.abs(values), kind="stable")[:count]
    indices: list[int] = np.sort(order[values[order] != 0]).tolist()
    return indices


def vectors() -> dict[str, NDArray[np.float32]]:
    """Return vectors that could mislead a sample."""
    random = np.random.default_rng(0)
    size = 300_000
    spike = np.zeros(size, np.float32)
    spike[::9] = random.standard_normal(len(spike[::9]))  # with the period of the sample
    return {
        "gaussian": random.standard_normal(size).astype(np.float32),
        "ties": random.integers(-3, 4, size).astype(np.float32),
        "one value": np.full(size, -2, np.float32),
        "periodic": spike,
        "anti-periodic": np.where(np.arange(size) % 9 == 0, 100, random.random(size)).astype(np.float32),
        "rising": np.linspace(0, 1, size, dtype=np.float32),
        "tiny": random.standard_normal(size).astype(np.float32) * np.float32(1e-42),
        "zeros": np.zeros(size, np.float32),
        "negative zeros": np.full(size, -0.0, np.float32),
    }


@pytest.mark.parametrize("kind", vectors())
def test_largest_agrees_with_sorting(kind: str) -> None:
    values = vectors()[kind]
    for count in (0, 1, 2, 17, 3_000, 30_000, 299_999, 300_000, 400_000):
        assert largest(values, count).tolist() == by_sorting(values, count)


def test_ties_go_to_the_lowest_index() -> None:
    assert largest(np.array([1, -2, 2, 2, 1], np.float32), 2).tolist() == [1, 2]


def test_nan_and_infinity_count_as_largest() -> None:
    assert largest(np.array([1, np.nan, 5, -np.inf], np.float32), 2).tolist() == [1, 3]


def test_an_empty_vector_has_no_largest_entries() -> None:
    assert largest(np.empty(0, np.float32), 5).tolist() == []


def test_strided_vectors_are_supported() -> None:
    values = np.arange(20, dtype=np.float32)[::2]
    assert largest(values, 2).tolist() == [8, 9]
