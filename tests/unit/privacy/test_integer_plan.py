"""Plans for integers with noise: the scale, the bits, what they cost, and what is refused."""

from math import sqrt
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedring.privacy.account import epsilon
from fedring.privacy.integer_plan import MAX_BITS, fewest_bits, integer_plan

DIMENSION = 25_000_000
GROUP: dict[str, Any] = {"noise_multiplier": 1.0, "clients": 8, "survivors": 6, "dimension": DIMENSION}


def group(**keys: Any) -> dict[str, Any]:
    return {**GROUP, **keys}


def survivors(clients: int) -> int:
    return 2 * clients // 3 + 1


@settings(max_examples=60, deadline=None)
@given(
    noise_multiplier=st.floats(0.05, 5.0),
    clients=st.integers(3, 100),
    dimension=st.integers(1, 10**8),
    clip=st.floats(1e-6, 1e6),
)
def test_the_fewest_bits_give_a_plan_with_its_noise(
    noise_multiplier: float, clients: int, dimension: int, clip: float
) -> None:
    fewest = survivors(clients)
    keys = group(noise_multiplier=noise_multiplier, clients=clients, survivors=fewest, dimension=dimension)
    plan = integer_plan(clip=clip, bits=fewest_bits(**keys), **keys)
    assert sqrt(plan.central_variance) == pytest.approx(noise_multiplier * clip * plan.scale)
    assert plan.central_variance == pytest.approx(plan.local_variance * fewest)
    assert plan.padded % plan.block == 0
    assert 0 <= plan.padded - dimension < plan.block
    assert noise_multiplier / 1.1 <= plan.multiplier < noise_multiplier
    assert plan.charge.norm == plan.rounded_norm > clip * plan.scale


@pytest.mark.parametrize("clients", [8, 33, 100])
@pytest.mark.parametrize(("noise_multiplier", "bits"), [(0.3, 20), (1.0, 20), (2.0, 20), (5.0, 22)])
def test_the_noise_costs_hardly_more_than_gaussian_noise(noise_multiplier: float, bits: int, clients: int) -> None:
    keys = group(noise_multiplier=noise_multiplier, clients=clients, survivors=survivors(clients))
    plan = integer_plan(clip=0.1, bits=bits, **keys)
    for rounds in (1, 50):
        gaussian = epsilon([noise_multiplier] * rounds, 1e-5)
        assert gaussian < epsilon([plan.charge] * rounds, 1e-5) < 1.02 * gaussian


def test_a_bit_more_doubles_the_scale_until_it_is_of_no_use() -> None:
    scales = [integer_plan(clip=0.1, bits=bits, **GROUP).scale for bits in (17, 18, 19, 40, MAX_BITS)]
    assert scales[1] / scales[0] == pytest.approx(2.0, rel=0.001)
    assert scales[2] / scales[1] == pytest.approx(2.0, rel=0.001)
    assert scales[2] < scales[3] == scales[4]
    assert scales[3] * 0.1 == pytest.approx(16 * sqrt(DIMENSION), rel=0.001)


def test_one_bit_less_than_the_fewest_rounds_too_much() -> None:
    bits = fewest_bits(**GROUP)
    norms = [integer_plan(clip=1.0, bits=each, **GROUP) for each in (bits - 1, bits)]
    assert [plan.rounded_norm / plan.scale <= 1.01 for plan in norms] == [False, True]
    fewest = fewest_bits(**GROUP, rounding=1.1)
    integer_plan(clip=1.0, bits=fewest, **GROUP)
    with pytest.raises(
        ValueError, match=f"bits = {fewest - 1} are too few for 25000000 values of 8 clients .*: {fewest} are needed"
    ):
        integer_plan(clip=1.0, bits=fewest - 1, **GROUP)


def test_more_noise_than_can_be_drawn_gets_fewer_integers_and_at_last_none() -> None:
    plan = integer_plan(clip=1.0, bits=MAX_BITS, **group(noise_multiplier=20.0))
    assert plan.local_variance == pytest.approx(2.0**32, rel=0.001)
    assert plan.scale < 16 * sqrt(DIMENSION)
    assert fewest_bits(**group(noise_multiplier=20.0)) < MAX_BITS
    with pytest.raises(ValueError, match=r"too few for .* and so are any: less noise is needed"):
        integer_plan(clip=1.0, bits=MAX_BITS, **group(noise_multiplier=100.0))


def test_a_larger_group_has_a_smaller_scale_because_its_sum_is_larger() -> None:
    def scale(clients: int, noise_multiplier: float = 1.0) -> float:
        return integer_plan(clip=1.0, bits=20, **group(clients=clients, noise_multiplier=noise_multiplier)).scale

    assert scale(8) > scale(50) > scale(100)
    assert scale(8) > scale(8, 2.0)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"clip": 0.0}, "clip = 0.0 is not"),
        ({"clip": float("nan")}, "clip = nan is not"),
        ({"noise_multiplier": 0.0}, "noise_multiplier = 0.0 is not"),
        ({"noise_multiplier": float("inf")}, "noise_multiplier = inf is not"),
        ({"noise_multiplier": 1e-12}, "is too small for integers of 20 bits"),
        ({"survivors": 0}, "survivors = 0 is not from 1 to clients = 8"),
        ({"survivors": 9}, "survivors = 9 is not from 1 to clients = 8"),
        ({"dimension": 0}, "dimension = 0 is not above 0"),
        ({"bits": 7}, "bits = 7 is not from 8 to 48"),
        ({"bits": 49}, "bits = 49 is not from 8 to 48"),
        ({"bits": 8}, "bits = 8 are too few"),
        ({"block": 4}, "block = 4 is not a power of two of at least 8"),
        ({"block": 100}, "block = 100 is not a power of two"),
        ({"clients": 10**9, "bits": 20}, "bits = 20 are too few"),
    ],
)
def test_bad_arguments_are_refused(keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        integer_plan(**{"clip": 0.1, "bits": 20, **GROUP, **keys})
