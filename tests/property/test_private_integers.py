"""Vectors as integers with noise: their sum is right, their norm is bounded, and the noise is what was promised."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedring.privacy.integer_plan import IntegerPlan, integer_plan
from fedring.privacy.integers import RoundingFailed, decode_sum, encode_private
from fedring.privacy.rotation import Rotation
from fedring.privacy.skellam import MIN_VARIANCE

SEED = b"the seed of a round, which is public"


def plan_of(**keys: Any) -> IntegerPlan:
    group = {"clip": 1.0, "noise_multiplier": 1.0, "clients": 5, "survivors": 4, "dimension": 1000, "block": 128}
    return integer_plan(**{**group, **keys})


def silent(plan: IntegerPlan) -> IntegerPlan:
    """Return the plan with hardly any noise: one of 2^32 values is moved."""
    return replace(plan, local_variance=MIN_VARIANCE)


def vector(plan: IntegerPlan, number: int, norm: float) -> NDArray[np.float32]:
    values = np.random.default_rng(number).standard_normal(plan.dimension)
    return (norm * values / np.linalg.norm(values)).astype(np.float32)


def secret(number: int) -> bytes:
    return number.to_bytes(32, "big")


# The sum


@settings(max_examples=30, deadline=None)
@given(
    dimension=st.integers(1, 3000),
    block=st.sampled_from([8, 64, 1024]),
    clients=st.integers(1, 6),
    clip=st.floats(1e-3, 1e3),
    share=st.floats(0.0, 1.0),
    seed=st.binary(),
)
def test_the_sum_of_what_clients_send_is_the_sum_of_their_vectors(
    dimension: int, block: int, clients: int, clip: float, share: float, seed: bytes
) -> None:
    plan = silent(plan_of(dimension=dimension, block=block, clients=clients, survivors=clients, clip=clip, bits=24))
    deltas = [vector(plan, number, share * clip) for number in range(clients)]
    total = sum(encode_private(delta, plan, seed, secret(number)) for number, delta in enumerate(deltas))
    assert isinstance(total, np.ndarray)
    decoded = decode_sum(total % 2**plan.bits, plan, seed, 0)
    assert len(decoded) == plan.padded
    exact = np.zeros(plan.padded)
    exact[:dimension] = np.sum([delta.astype(np.float64) for delta in deltas], axis=0)
    # each value is rounded by less than 1, which the rotation turns into a vector of the same norm
    assert np.linalg.norm(decoded - exact) <= 1.001 * clients * plan.padded**0.5 / plan.scale + 1e-6 * clip


def test_noise_is_all_that_is_added() -> None:
    plan = plan_of(dimension=200_000, block=4096, bits=20)
    deltas = [vector(plan, number, 1.0) for number in range(4)]
    total = sum(encode_private(delta, plan, SEED, secret(number)) for number, delta in enumerate(deltas))
    assert isinstance(total, np.ndarray)
    error = decode_sum(total, plan, SEED, 0)[: plan.dimension] - np.sum(deltas, axis=0)
    assert error.std() == pytest.approx(1.0, rel=0.01)  # noise_multiplier times clip
    assert abs(error.mean()) < 6 / plan.dimension**0.5
    five = total + encode_private(vector(plan, 5, 1.0), plan, SEED, secret(5))
    more = decode_sum(five, plan, SEED, 0)[: plan.dimension] - np.sum(deltas, axis=0) - vector(plan, 5, 1.0)
    assert more.var() == pytest.approx(5 / 4, rel=0.02)


def test_no_noise_is_used_twice_in_a_long_vector() -> None:
    sent = encode_private(np.zeros(2**19, np.float32), plan_of(dimension=2**19, block=4096, bits=20), SEED, secret(0))
    for shift in (4096, 2**17, 2**18):
        assert abs(np.corrcoef(sent[shift:], sent[:-shift])[0, 1]) < 0.02


def test_a_sum_is_decoded_in_pieces_whatever_stands_for_a_residue() -> None:
    plan = plan_of(bits=24)
    total = encode_private(vector(plan, 0, 1.0), plan, SEED, secret(0))
    whole = decode_sum(total, plan, SEED, 0)
    for start, stop in ((0, 128), (128, 512), (896, 1024)):
        assert np.array_equal(decode_sum(total[start:stop], plan, SEED, start), whole[start:stop])
    for moved in (total % 2**24, total - 2**24, total + 5 * 2**24):
        assert np.array_equal(decode_sum(moved, plan, SEED, 0), whole)
    with pytest.raises(ValueError, match="are not whole blocks"):
        decode_sum(total[64:], plan, SEED, 64)


@pytest.mark.parametrize("clients", [5, 100])
def test_the_largest_sum_stays_in_the_range(clients: int) -> None:
    plan = plan_of(dimension=4096, block=4096, clients=clients, survivors=2 * clients // 3 + 1, bits=13)
    delta = np.zeros(4096, np.float32)
    delta[17] = 1.0  # of all clients
    single = encode_private(delta, silent(plan), SEED, secret(0))
    noise = sum(encode_private(0 * delta, plan, SEED, secret(number)) for number in range(clients))
    assert isinstance(noise, np.ndarray)
    largest = np.abs(noise + clients * single).max()
    assert 2 ** (plan.bits - 1) / 8 < largest < 2 ** (plan.bits - 1)


# The norm


@settings(max_examples=60, deadline=None)
@given(
    number=st.integers(0, 2**32), norm=st.floats(0.0, 1e6), single=st.booleans(), noise_multiplier=st.floats(0.1, 20.0)
)
def test_no_vector_of_integers_is_longer_than_the_plan_says(
    number: int, norm: float, single: bool, noise_multiplier: float
) -> None:
    plan = silent(plan_of(noise_multiplier=noise_multiplier, dimension=300, bits=18))
    delta = vector(plan, number, norm)
    if single:
        delta[1:] = 0.0
    sent = encode_private(delta, plan, SEED, secret(number))
    assert np.linalg.norm(sent) <= plan.rounded_norm + 1


def test_a_long_vector_is_shortened_to_the_clip() -> None:
    plan = silent(plan_of(bits=24))
    delta = vector(plan, 0, 50.0)
    decoded = decode_sum(encode_private(delta, plan, SEED, secret(0)), plan, SEED, 0)[: plan.dimension]
    assert np.linalg.norm(decoded - delta / 50.0) < 0.05
    assert np.linalg.norm(decoded) == pytest.approx(1.0, abs=0.01)


def test_rounding_is_tried_until_the_norm_is_kept() -> None:
    plan = silent(plan_of(bits=12))
    delta = vector(plan, 0, 1.0)
    norms = [np.linalg.norm(encode_private(delta, plan, SEED, secret(number))).item() for number in range(40)]
    strict = replace(plan, rounded_norm=float(np.median(norms)))
    again = [np.linalg.norm(encode_private(delta, strict, SEED, secret(number))).item() for number in range(40)]
    assert max(again) <= strict.rounded_norm < max(norms)
    with pytest.raises(RoundingFailed, match="after 256 attempts"):
        encode_private(delta, replace(plan, rounded_norm=1.0), SEED, secret(0))


def test_rounding_has_no_bias() -> None:
    plan = silent(plan_of(bits=16, dimension=128, block=128))
    delta = vector(plan, 0, 1.0)
    exact = np.zeros(plan.padded)
    exact[:128] = delta.astype(np.float64) * plan.scale
    Rotation(SEED, plan.block).apply(exact, 0)
    sent = np.array([encode_private(delta, plan, SEED, secret(number)) for number in range(4000)])
    assert set(np.unique(sent - np.floor(exact))) == {0.0, 1.0}
    assert np.abs(sent.mean(axis=0) - exact).max() < 6 * 0.5 / 4000**0.5


# The secret


def test_the_same_arguments_give_the_same_integers_and_others_other_noise() -> None:
    plan = plan_of(dimension=4096)
    delta = vector(plan, 0, 1e-9)
    first = encode_private(delta, plan, SEED, secret(0))
    assert np.array_equal(encode_private(delta.copy(), plan, SEED, secret(0)), first)
    others = [
        encode_private(delta, plan, SEED, secret(1)),
        encode_private(vector(plan, 1, 1e-9), plan, SEED, secret(0)),
        encode_private(delta, plan, b"another seed", secret(0)),
        encode_private(delta, replace(plan, clip=0.999), SEED, secret(0)),
    ]
    for other in others:
        assert abs(np.corrcoef(first, other)[0, 1]) < 0.1


@pytest.mark.parametrize(
    ("delta", "sentence"),
    [
        (np.zeros(999, np.float32), "is not one of 1000 values"),
        (np.zeros((1, 1000), np.float32), "is not one of 1000 values"),
        (np.full(1000, np.nan, np.float32), "not finite"),
        (np.full(1000, -np.inf, np.float32), "not finite"),
    ],
    ids=["short", "matrix", "nan", "infinite"],
)
def test_what_is_no_finite_vector_of_the_plan_is_refused(delta: NDArray[np.float32], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        encode_private(delta, plan_of(), SEED, secret(0))


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="a secret of 31 bytes is shorter than 32"):
        encode_private(np.zeros(1000, np.float32), plan_of(), SEED, bytes(31))
