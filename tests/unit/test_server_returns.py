"""How long clients take to come back."""

from math import inf, nan

import pytest

from fedring.server.group.returns import MOST_SECONDS, Returns


def test_the_slowest_return_counts() -> None:
    returns = Returns()
    assert returns.slowest == 0
    returns.came("a", 4.0, now=10.0)
    assert returns.slowest == 4, "what a client says of its first start"
    returns.left("a", now=20.0)
    returns.came("a", 4.0, now=45.0)
    returns.left("b", now=50.0)
    returns.came("b", 4.0, now=51.0)
    assert returns.slowest == 25


def test_who_was_away_for_a_day_was_not_restarted() -> None:
    returns = Returns()
    returns.left("a", now=0.0)
    returns.came("a", 3.0, now=86_400.0)
    assert returns.slowest == 3


@pytest.mark.parametrize("said", [nan, inf, -inf, -1.0, MOST_SECONDS + 1, 1e308])
def test_nonsense_is_not_believed(said: float) -> None:
    returns = Returns()
    returns.came("a", said, now=0.0)
    assert returns.slowest == 0


def test_only_the_newest_are_remembered() -> None:
    returns = Returns()
    returns.came("a", 100.0, now=0.0)
    for number in range(64):
        returns.came(f"c{number}", 1.0, now=0.0)
    assert returns.slowest == 1
