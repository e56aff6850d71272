"""Skellam noise: its distribution, its table, and the key stream that draws it."""

from fractions import Fraction
from itertools import pairwise
from math import factorial

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.special import ive
from scipy.stats import chisquare, skellam

from fedring.privacy import skellam as module
from fedring.privacy.keystream import KeyStream
from fedring.privacy.skellam import MAX_VARIANCE, MIN_VARIANCE, SkellamNoise

SECRET = bytes(range(32))
DRAWN = 1_000_000


def noise(variance: float, context: str = "noise") -> SkellamNoise:
    return SkellamNoise(variance, KeyStream(SECRET, [context]), KeyStream(SECRET, [context, "lower"]))


class FixedWords(KeyStream):
    """A stream of which every word is the same, but the sixth.

    Args:
        word: from 0 to 2^64 - 1.
        sixth: the same, if it is another.
    """

    def __init__(self, word: int, sixth: int | None = None) -> None:
        super().__init__(SECRET, [])
        self._word, self._sixth = word, word if sixth is None else sixth

    def words(self, start: int, stop: int) -> NDArray[np.uint64]:
        drawn = [self._sixth if place == 5 else self._word for place in range(start, stop)]
        return np.array(drawn, np.uint64)


# The key stream


def test_a_stream_is_the_same_in_pieces_and_depends_on_its_context() -> None:
    stream = KeyStream(SECRET, ["a"])
    whole = stream.read(0, 100)
    for start, stop in ((0, 0), (0, 1), (15, 17), (16, 32), (31, 100)):
        assert stream.read(start, stop) == whole[start:stop]
    assert stream.words(1, 4).tobytes() == whole[8:32]
    assert len({KeyStream(SECRET, context).read(0, 16) for context in (["a"], ["b"], ["a", ""], ["", "a"])}) == 4


# The distribution


@pytest.mark.parametrize("variance", [0.5, 30.0, 1e4, 1e6, 1e9])
def test_the_noise_has_its_mean_and_its_variance(variance: float) -> None:
    drawn = noise(variance).draw(0, DRAWN)
    assert drawn.var() == pytest.approx(variance, rel=0.01)
    assert abs(drawn.mean()) < 6 * (variance / DRAWN) ** 0.5


@pytest.mark.parametrize("variance", [0.01, 1.0, 7.3, 50.0])
def test_the_noise_has_the_probabilities_of_the_distribution(variance: float) -> None:
    values, counts = np.unique(noise(variance).draw(0, DRAWN), return_counts=True)
    expected = skellam.pmf(values, variance / 2, variance / 2) * DRAWN
    often = expected >= 20
    others = [counts[~often].sum() + 1e-9], [DRAWN - expected[often].sum() + 1e-9]
    seen = np.concatenate([counts[often], others[0]])
    assert chisquare(seen, np.concatenate([expected[often], others[1]]), sum_check=False).pvalue > 1e-6


def test_values_are_independent_of_each_other_and_of_other_contexts() -> None:
    drawn, other = noise(20.0).draw(0, DRAWN), noise(20.0, "other").draw(0, DRAWN)
    for left, right in ((drawn[:-1], drawn[1:]), (drawn, other)):
        assert abs(np.corrcoef(left, right)[0, 1]) < 6 / DRAWN**0.5


def test_the_noise_is_the_same_in_pieces() -> None:
    drawn = noise(1e5).draw(0, 1000)
    for start, stop in ((0, 0), (0, 1), (1, 2), (499, 1000)):
        assert np.array_equal(noise(1e5).draw(start, stop), drawn[start:stop])


@pytest.mark.parametrize("variance", [0.0, -1.0, float("nan"), MIN_VARIANCE / 2, MAX_VARIANCE * 2])
def test_a_variance_that_cannot_be_drawn_is_refused(variance: float) -> None:
    with pytest.raises(ValueError, match="is not from"):
        noise(variance)


# The table


def thresholds(variance: float) -> list[int]:
    upper, lower, _ = module._table(variance)
    return [(high << 64) + low for high, low in zip(upper.tolist(), lower.tolist(), strict=True)]


@pytest.mark.parametrize("variance", [2.0, 0.25])
def test_the_table_is_exact_to_its_last_bits(variance: float) -> None:
    half = Fraction(variance) / 2

    def bessel(k: int) -> Fraction:  # the power series of I_k
        return sum((half ** (2 * m + k) / (factorial(m) * factorial(m + k)) for m in range(60)), Fraction(0))

    values = [bessel(k) for k in range(80)]
    whole = values[0] + 2 * sum(values[1:])  # exp(variance)
    table = thresholds(variance)
    middle = len(table) // 2
    for k in range(1, middle + 1):
        exact = sum(values[k:]) * 2**128 / whole  # P(X >= k)
        assert abs(table[middle - k] - exact) <= 2
        assert abs(table[middle + k - 1] - (2**128 - exact)) <= 2


@pytest.mark.parametrize("variance", [0.01, 40.0, 1234.5, 1e6])
def test_the_table_agrees_with_the_bessel_functions(variance: float) -> None:
    table = thresholds(variance)
    middle = len(table) // 2
    chances = np.array([(after - before) / 2**128 for before, after in pairwise(table)])
    exact = ive(np.abs(np.arange(1 - middle, middle)), variance)
    assert np.allclose(chances, exact, rtol=1e-11, atol=1e-30)
    assert table == sorted(table)
    assert table[0] < 2**64  # nothing is left out that one of 2^64 draws would show


def test_lower_bits_decide_where_the_upper_ones_are_on_an_edge() -> None:
    upper, lower, _ = (half.tolist() for half in module._table(3.0))
    middle = len(upper) // 2
    place = middle + 2

    def drawn(low: int) -> int:
        return SkellamNoise(3.0, FixedWords(upper[place]), FixedWords(low)).draw(5, 6).item()

    assert drawn(lower[place] - 1) == place - middle
    assert drawn(lower[place]) == place - middle + 1
    mixed = SkellamNoise(3.0, FixedWords(upper[place]), FixedWords(0, sixth=lower[place])).draw(3, 8)
    assert (mixed - place + middle).tolist() == [0, 0, 1, 0, 0]
    assert SkellamNoise(3.0, FixedWords(0), FixedWords(0)).draw(0, 1).item() == -middle
    assert SkellamNoise(3.0, FixedWords(2**64 - 1), FixedWords(2**64 - 1)).draw(0, 1).item() == middle
