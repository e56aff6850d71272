"""Measurements that take turns."""

import time
from collections.abc import Callable, Mapping
from typing import TypeVar

_T = TypeVar("_T")


def alternate(ways: Mapping[str, Callable[[], _T]], turns: int, *, warm_up: int = 0) -> dict[str, list[_T]]:
    """Call every way once a turn.

    Other load on the machine affects all of them alike then.

    Args:
        ways: The functions to compare, by name. Each returns what it has measured.
        turns: Turns whose results are returned.
        warm_up: Turns before those, whose results are dropped.

    Returns:
        What each way returned, by its name, in the order of the turns.
    """
    results: dict[str, list[_T]] = {name: [] for name in ways}
    for turn in range(warm_up + turns):
        for name, measure in ways.items():
            result = measure()
            if turn >= warm_up:
                results[name].append(result)
    return results


def time_call(action: Callable[[], object]) -> float:
    """Return the seconds that one call takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began
