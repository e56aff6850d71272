"""Privacy accounting: epsilon for a delta, by Renyi differential privacy.

The definition is that of Mironov (2017). Two data sets are neighbours if one has all the data of one client more, or
one sample more ("add or remove one").
"""

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import inf, isnan
from typing import Any

from fedring.privacy.charges import Charge, renyi


@dataclass(frozen=True, slots=True)
class SampledSteps:
    """Steps of DP-SGD with Poisson sampling.

    In each of them, each sample takes part with the same probability, independently of others.
    """

    rate: float  # that probability, above 0 and at most 1
    noise_multiplier: float  # deviation of the Gaussian noise in units of the most that one sample changes the sum
    steps: int


class NoAccountant(Exception):
    """The package that computes epsilon is not installed."""


def check_accountant() -> None:
    """Check that epsilon can be computed.

    Raises:
        NoAccountant: if dp-accounting is not installed.
    """
    _accounting()


def epsilon(charges: Iterable[Charge], delta: float) -> float:
    """Return the epsilon of all these releases, without amplification by sampling.

    Args:
        charges: of each release, the standard deviation of its Gaussian noise in units of the most that one client can
            change it (in L2 norm), above 0; or the charge of its Skellam noise.
        delta: the probability that epsilon may fail, above 0 and below 1.

    Raises:
        NoAccountant: if dp-accounting is not installed.
    """
    counts = Counter(charges)
    return _epsilon(tuple(sorted(counts.items(), key=str)), delta) if counts else 0.0


def sampled_epsilon(spent: Iterable[SampledSteps], delta: float) -> float:
    """Return the epsilon of all these steps, amplified by Poisson sampling.

    Args:
        spent: the steps.
        delta: the probability that epsilon may fail, above 0 and below 1.

    Raises:
        NoAccountant: if dp-accounting is not installed.
    """
    counts = Counter[tuple[float, float]]()
    for each in spent:
        counts[each.rate, each.noise_multiplier] += each.steps
    return _sampled_epsilon(tuple(sorted(counts.items())), delta) if counts else 0.0


@lru_cache(maxsize=256)
def _epsilon(counts: tuple[tuple[Charge, int], ...], delta: float) -> float:
    accountant = _accounting().rdp.rdp_privacy_accountant
    orders = accountant.DEFAULT_RDP_ORDERS
    spent = [sum(count * renyi(charge, order) for charge, count in counts) for order in orders]
    return float(accountant.compute_epsilon(orders, spent, delta)[0])


@lru_cache(maxsize=256)
def _sampled_epsilon(counts: tuple[tuple[tuple[float, float], int], ...], delta: float) -> float:
    accounting = _accounting()
    accountant = accounting.rdp.RdpAccountant(neighboring_relation=accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    try:
        for (rate, multiplier), steps in counts:
            event = accounting.PoissonSampledDpEvent(rate, accounting.GaussianDpEvent(multiplier))
            accountant.compose(event, steps)
        total = float(accountant.get_epsilon(delta))
    except OverflowError:  # there is hardly any noise
        return inf
    return inf if isnan(total) else total


def _accounting() -> Any:
    try:
        import dp_accounting.rdp  # it takes about a second, and most servers never need it
    except ImportError as error:
        raise NoAccountant("install fedring[privacy], whose dp-accounting computes epsilon") from error
    logging.getLogger("absl").setLevel(logging.ERROR)  # It warns of each order that it leaves out, which is harmless.
    return dp_accounting
