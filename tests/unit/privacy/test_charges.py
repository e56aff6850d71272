"""What Gaussian and Skellam noise cost: against the divergence itself, as texts, and added up."""

from math import inf

import dp_accounting
import numpy as np
import pytest
from dp_accounting.rdp import RdpAccountant
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.special import ive

from fedring.privacy.account import epsilon
from fedring.privacy.charges import Charge, SkellamCharge, charge_of, renyi

ORDERS = (1.05, 1.1, 1.3, 1.5, 1.9, 2.0, 2.5, 3.0, 4.5, 8.0, 10.9, 32.0, 64.0)
POSITIVE = st.floats(1e-300, 1e300)


def divergence(shifts: tuple[int, ...], variance: float, order: float) -> float:
    """Return the Renyi divergence of Skellam noise that is moved by these shifts, from its probabilities."""
    reach = int(45 * variance**0.5) + 200
    values = np.arange(-reach, reach + 1)

    def log_chance(of: NDArray[np.int64]) -> NDArray[np.float64]:
        logarithms: NDArray[np.float64] = np.log(np.maximum(ive(np.abs(of), variance), 5e-324))
        return logarithms

    total = 0.0
    for shift in shifts:
        one, other = log_chance(values + shift), log_chance(values)
        known = (one > -640) & (other > -640)  # where float64 has them
        total += np.logaddexp.reduce((order * one + (1 - order) * other)[known]).item() / (order - 1)
    return total


# Of a long move with little noise, float64 cannot hold the probabilities, and so has no exact divergence.
MOVED = [
    (shifts, variance)
    for shifts in [(1,), (2,), (3,), (10,), (50,), (1, 1, 1, 1), (3, 0, 1, 0, 7)]
    for variance in [0.05, 0.3, 1.0, 3.0, 10.0, 100.0, 1000.0, 20_000.0]
    if max(shifts) <= 20 * variance**0.5 + 10
]


@pytest.mark.parametrize(("shifts", "variance"), MOVED, ids=str)
def test_the_bounds_are_above_the_divergence(shifts: tuple[int, ...], variance: float) -> None:
    charge = SkellamCharge(float(np.linalg.norm(shifts)), len(shifts), variance)
    for order in ORDERS:
        exact = divergence(shifts, variance, order) * (1 - 1e-7)
        assert exact <= charge.renyi(order)
        assert exact <= charge._by_curvature(order)


@pytest.mark.parametrize(("variance", "shift", "least"), [(1000.0, 1, 0.99), (1000.0, 10, 0.97), (20_000.0, 10, 0.999)])
def test_the_bound_is_close_to_the_divergence_if_there_is_noise(variance: float, shift: int, least: float) -> None:
    charge = SkellamCharge(float(shift), 1, variance)
    for order in (2.0, 8.0, 32.0):
        assert divergence((shift,), variance, order) / charge.renyi(order) >= least
    if shift == 10:
        for order in (1.5, 2.5, 4.5, 8.5):
            assert divergence((shift,), variance, order) / charge.renyi(order) >= 0.98


def test_the_bound_is_the_published_one_at_integer_orders() -> None:
    small, large = SkellamCharge(2.0, 100, 0.5), SkellamCharge(30.0, 4, 400.0)
    assert small.renyi(3) == 3 * 4 / (2 * 0.5) + 3 * 4 / (2 * 0.5)  # whose L1 norm is at most 2 * 2
    assert large.renyi(3) == pytest.approx(3 * 900 / 800 + (5 * 900 + 6 * 60) / (4 * 400**2))  # at most 30 * sqrt(4)
    assert SkellamCharge(30.0, 4, 400.0).renyi(1.01) < large.renyi(2)


def test_more_noise_costs_less_and_a_larger_norm_more() -> None:
    def spent(norm: float, variance: float) -> float:
        return epsilon([SkellamCharge(norm, 1000, variance)], 1e-5)

    assert spent(100.0, 1e4) > spent(100.0, 2e4) > spent(70.0, 2e4)
    assert spent(1e300, 1e-300) == inf


@pytest.mark.parametrize("multiplier", [0.2, 1.0, 7.0])
def test_gaussian_noise_costs_what_the_accountant_says(multiplier: float) -> None:
    accountant = RdpAccountant().compose(dp_accounting.GaussianDpEvent(multiplier), 20)
    assert epsilon([multiplier] * 20, 1e-6) == pytest.approx(accountant.get_epsilon(1e-6), rel=1e-9)
    assert epsilon([1e-200], 1e-5) == inf


@pytest.mark.parametrize("multiplier", [0.3, 1.0, 5.0])
def test_fine_integers_cost_what_gaussian_noise_does(multiplier: float) -> None:
    norm = 1e6
    charge = SkellamCharge(norm, 1000, (multiplier * norm) ** 2)
    for rounds in (1, 50):
        assert epsilon([charge] * rounds, 1e-5) == pytest.approx(epsilon([multiplier] * rounds, 1e-5), rel=1e-4)


def test_charges_of_both_kinds_add_up_in_any_order() -> None:
    skellam = SkellamCharge(100.0, 50, 1e4)
    both = epsilon([1.0, skellam, 1.0, skellam], 1e-5)
    assert both == epsilon([skellam, skellam, 1.0, 1.0], 1e-5)
    assert both == pytest.approx(epsilon([1.0] * 4, 1e-5), rel=0.001)
    assert epsilon([1.0, 1.0], 1e-5) < both


@given(st.one_of(POSITIVE, st.builds(SkellamCharge, POSITIVE, st.integers(1, 2**40), POSITIVE)))
def test_a_charge_is_its_text(charge: Charge) -> None:
    assert charge_of(str(charge)) == charge


@pytest.mark.parametrize(
    "text",
    [
        *("", "x", "0", "-1", "nan", "inf", "1.0 1 1", "skellam", "skellam 1 2", "skellam 1 2 3 4", "skellam 1 2.5 3"),
        *("skellam 0 1 1", "skellam 1 0 1", "skellam 1 1 -1", "skellam nan 1 1", "skellam 1 1 inf", "skellamx 1 1 1"),
    ],
)
def test_what_is_no_charge_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        charge_of(text)


def test_a_gaussian_charge_is_a_number() -> None:
    assert charge_of("1.5") == 1.5
    assert renyi(2.0, 3.0) == 3.0 / 8.0
