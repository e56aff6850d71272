"""How much privacy was spent: epsilon for a delta, by Renyi differential privacy (Mironov 2017).

Two data sets are neighbours if one has all the data of one client more ("add or remove one").
"""

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from math import inf
from typing import Any


class NoAccountant(Exception):
    """The package that computes epsilon is not installed."""


def check_accountant() -> None:
    """Return if epsilon can be computed.

    Raises:
        NoAccountant: if dp-accounting is not installed.
    """
    _accounting()


def epsilon(noise_multipliers: Iterable[float], delta: float) -> float:
    """Return the epsilon of all of these releases together, without amplification by sampling.

    Args:
        noise_multipliers: of each release, the standard deviation of its Gaussian noise in units of the most that one
            client can change it (in L2 norm), above 0.
        delta: the probability that epsilon may fail, above 0 and below 1.

    Raises:
        NoAccountant: if dp-accounting is not installed.
    """
    counts = Counter(noise_multipliers)
    return _epsilon(tuple(sorted(counts.items())), delta) if counts else 0.0


@lru_cache(maxsize=256)
def _epsilon(counts: tuple[tuple[float, int], ...], delta: float) -> float:
    accounting = _accounting()
    accountant = accounting.rdp.RdpAccountant(neighboring_relation=accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    for multiplier, count in counts:
        accountant.compose(accounting.GaussianDpEvent(multiplier), count)
    try:
        return float(accountant.get_epsilon(delta))
    except OverflowError:  # there is hardly any noise
        return inf


def _accounting() -> Any:
    try:
        import dp_accounting.rdp  # it takes about a second, and most servers never need it
    except ImportError as error:
        raise NoAccountant("install fedring[privacy], whose dp-accounting computes epsilon") from error
    return dp_accounting
