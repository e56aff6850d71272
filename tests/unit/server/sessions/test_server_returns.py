"""How long clients take to come back to the server."""

from math import inf, nan

import pytest

from fedring.server.sessions.returns import MOST_SECONDS, Returns


def test_the_slowest_return_is_the_longest_absence_or_start() -> None:
    returns = Returns()
    assert returns.slowest == 0
    returns.came("a", 4.0, now=10.0)
    assert returns.slowest == 4, "the client has reported how long its first start took"
    returns.left("a", now=20.0)
    returns.came("a", 4.0, now=45.0)
    returns.left("b", now=50.0)
    returns.came("b", 4.0, now=51.0)
    assert returns.slowest == 25


def test_an_absence_of_a_day_does_not_count_as_a_restart() -> None:
    returns = Returns()
    returns.left("a", now=0.0)
    returns.came("a", 3.0, now=86_400.0)
    assert returns.slowest == 3


@pytest.mark.parametrize("reported", [nan, inf, -inf, -1.0, MOST_SECONDS + 1, 1e308])
def test_an_impossible_duration_is_ignored(reported: float) -> None:
    returns = Returns()
    returns.came("a", reported, now=0.0)
    assert returns.slowest == 0


def test_only_the_newest_returns_are_remembered() -> None:
    returns = Returns()
    returns.came("a", 100.0, now=0.0)
    for number in range(64):
        returns.came(f"c{number}", 1.0, now=0.0)
    assert returns.slowest == 1
