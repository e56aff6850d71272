"""Attacks compute what their papers say. The figures with byzfl are those of byzfl 0.0.11 for the same updates."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from tests.attacks import formulas
from tests.attacks.attacker import ATTACKS, Attack, Attacker

from fedring.data import Samples

HONEST = np.array([[1, 2, 3, -4], [2, 1, 7, -2], [4, 0, 5, 0], [3, 5, -1, 1]], np.float32)


def test_a_little_is_enough_is_z_standard_deviations_below_the_mean() -> None:
    # byzfl.ALittleIsEnough(tau=-z * sqrt(3 / 4)), because it divides the variance by m - 1 and the paper by m.
    found = formulas.little_is_enough(HONEST, clients=20, malicious=4)
    np.testing.assert_allclose(found, [2.32412131, 1.70569866, 3.03466872, -1.55208157], rtol=1e-6)
    # With 6 clients, of which 2 are malicious, 2 of 4 honest ones are needed as supporters, so that z = 0.
    np.testing.assert_allclose(formulas.little_is_enough(HONEST, clients=6, malicious=2), HONEST.mean(axis=0))


def test_a_tuned_little_is_as_many_standard_deviations_as_the_attacker_likes() -> None:
    found = formulas.little(HONEST, 2.0)
    np.testing.assert_allclose(found, HONEST.mean(axis=0) - 2 * HONEST.std(axis=0), rtol=1e-6)
    assert formulas.little(HONEST, 0.0).tolist() == HONEST.mean(axis=0).tolist()


DIRECTIONS: list[formulas.Direction] = ["mean", "std", "sign"]


def honest_of(seed: int) -> formulas.Float32:
    """Return honest updates whose number, spread and mean differ with the seed."""
    rng = np.random.default_rng(seed)
    count, size = int(rng.integers(2, 12)), int(rng.integers(1, 60))
    return np.asarray(rng.normal(rng.normal(0, 2, size), rng.gamma(1.0, 1.0, size), (count, size)), np.float32)


def squared(honest: formulas.Float32, point: formulas.Float64) -> formulas.Float64:
    """Return the squared distance of each honest update to a point, [m]."""
    distances: formulas.Float64 = ((np.asarray(honest, np.float64) - point) ** 2).sum(axis=1)
    return distances


def step_of(honest: formulas.Float32, sent: formulas.Float32, direction: formulas.Direction) -> formulas.Float64:
    """Return what was added to the mean; assert that it points where it should."""
    mean = honest.mean(axis=0, dtype=np.float64)
    against = {"mean": mean, "std": honest.std(axis=0, dtype=np.float64), "sign": np.sign(mean)}[direction]
    step: formulas.Float64 = sent - mean
    cosine = -step @ against / np.linalg.norm(step) / np.linalg.norm(against)
    assert cosine == pytest.approx(1.0, abs=1e-4)
    return step


@pytest.mark.parametrize(("attack", "total"), [(formulas.min_max, np.max), (formulas.min_sum, np.sum)])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("seed", range(8))
def test_min_max_and_min_sum_go_as_far_as_the_honest_update_that_is_furthest_out(
    attack: Callable[[formulas.Float32, formulas.Direction], formulas.Float32],
    total: Callable[[formulas.Float64], float],
    seed: int,
    direction: formulas.Direction,
) -> None:
    honest = honest_of(seed)
    furthest = max(total(squared(honest, each)) for each in np.asarray(honest, np.float64))
    sent = attack(honest, direction)
    step, mean = step_of(honest, sent, direction), honest.mean(axis=0, dtype=np.float64)
    assert total(squared(honest, np.asarray(sent, np.float64))) <= furthest * (1 + 1e-5)
    assert total(squared(honest, mean + 1.001 * step)) > furthest


def test_min_max_and_min_sum_of_a_few_numbers_are_what_one_computes_by_hand() -> None:
    # Within 3 of both 0 and 3 lie 0 to 3. Of {0, 1, 5}, the sum for 5 is 25 + 16, and 3 (m - 2)^2 + 14 = 41 for m = -1.
    assert formulas.min_max(np.array([[0], [3]], np.float32)).tolist() == pytest.approx([0])
    assert formulas.min_max(np.array([[0], [1], [5]], np.float32)).tolist() == pytest.approx([0])
    assert formulas.min_sum(np.array([[0], [1], [5]], np.float32)).tolist() == pytest.approx([-1])


@pytest.mark.parametrize("attack", [formulas.min_max, formulas.min_sum])
def test_among_equal_updates_nothing_else_is_near_enough(
    attack: Callable[[formulas.Float32], formulas.Float32],
) -> None:
    for value in (0.0, 2.0):
        honest = np.full((3, 4), value, np.float32)
        np.testing.assert_allclose(attack(honest), honest[0], atol=1e-6)


def test_the_attack_on_the_trimmed_mean_is_just_beyond_all_honest_values() -> None:
    honest = np.array([[2, -2, -1, 4], [4, -4, 3, -5]], np.float32)  # the model goes up, down, up, and down
    sent = np.stack([formulas.beyond_the_ends(honest, np.random.default_rng(seed)) for seed in range(200)])
    lowest, highest = sent.min(axis=0), sent.max(axis=0)
    np.testing.assert_allclose(lowest, [1, -2, -2, 4], rtol=0.02)
    np.testing.assert_allclose(highest, [2, -1, -1, 8], rtol=0.02)
    assert (sent >= [1, -2, -2, 4]).all()
    assert (sent <= [2, -1, -1, 8]).all()
    assert len(np.unique(sent, axis=0)) == 200


def test_the_trimmed_mean_goes_back_under_the_attack_that_is_made_for_it() -> None:
    honest = honest_of(3)
    sent = [formulas.beyond_the_ends(honest, np.random.default_rng(seed)) for seed in range(2)]
    every = np.sort(np.vstack([honest, *sent]), axis=0)[2:-2]
    assert ((every.mean(axis=0) - honest.mean(axis=0)) * np.sign(honest.mean(axis=0)) < 0).mean() > 0.9


def test_a_capped_backdoor_has_the_norm_that_it_wants() -> None:
    for update in (HONEST[0], 100 * HONEST[1], 1e-3 * HONEST[2]):
        sent = formulas.capped(update, 2.9)
        assert np.linalg.norm(sent) == pytest.approx(2.9, rel=1e-6)
        np.testing.assert_allclose(sent / 2.9, update / np.linalg.norm(update), rtol=1e-5)
    assert formulas.capped(np.zeros(3, np.float32), 2.9).tolist() == [0, 0, 0]


def test_inner_product_manipulation_is_a_negative_multiple_of_the_mean() -> None:
    assert formulas.inner_product(HONEST, 2.0).tolist() == [-5.0, -4.0, -7.0, 2.5]  # byzfl with tau = 2


def test_the_victim_of_mimicry_is_furthest_out_where_clients_differ_most() -> None:
    along = np.array([[0, 0.1], [1, -0.1], [-1, 0], [-9, 0.3], [5, 0]], np.float32)
    assert formulas.victim(along + 100) == 3


def test_a_sign_flip_and_a_boost_scale_the_update() -> None:
    assert formulas.sign_flip(HONEST[0]).tolist() == [-1, -2, -3, 4]
    assert formulas.boosted(HONEST[0], 20).tolist() == [20, 40, 60, -80]


def test_flipped_labels_are_counted_from_the_other_end() -> None:
    samples = Samples(torch.zeros(3, 1, 14, 14), torch.tensor([0, 3, 9]))
    assert formulas.flip_labels(samples, 10).labels.tolist() == [9, 6, 0]
    assert samples.labels.tolist() == [0, 3, 9], "the client's own samples stay"


def test_the_trigger_is_a_square_at_the_bottom_right_and_success_is_measured_on_other_classes() -> None:
    samples = Samples(torch.zeros(3, 1, 28, 28), torch.tensor([formulas.TARGET, 4, 5]))
    marked = formulas.triggered(samples, 255.0)
    assert marked.labels.tolist() == [formulas.TARGET] * 2
    assert marked.inputs.sum() == 2 * 16 * 255
    assert marked.inputs[0, 0, 24:, 24:].min() == 255
    both = formulas.poisoned(samples, 255.0)
    assert both.labels.tolist() == [formulas.TARGET, 4, 5, *[formulas.TARGET] * 3]
    assert [int(image.sum()) for image in both.inputs] == [0, 0, 0, *[16 * 255] * 3]


def labels_as_update(samples: Samples) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Stand for training: return the labels and the brightness that were trained on."""
    return np.array([samples.labels.sum(), samples.inputs.sum()], np.float32)


@pytest.mark.parametrize(
    ("attack", "update", "count"),
    [
        ("none", [3, 0], 2),
        ("sign_flip", [-3, 0], 2),
        ("label_flip", [15, 0], 2),
        ("little_is_enough", [2.32412131, 1.70569866], 2),
        ("inner_product", [-5, -4], 2),
        ("mimic", [3, 5], 2),
        ("backdoor", [60, 160], 2),
        ("quiet_backdoor", [3, 8], 2),
        ("inflation", [15, 0], 1 << 40),
        ("tuned_little", [1.38196601, 0.12917131], 2),
        ("min_max", [0.61585875, 0.492687], 2),
        ("min_sum", [0.12508023, 0.10006419], 2),
        ("trim", [0.68151915, 0], 2),
        ("capped_backdoor", [3.174963, 8.466568], 2),
        ("median_backdoor", [1.0948149, 2.9195063], 2),
    ],
)
def test_an_attacker_sends_what_its_attack_computes(attack: Attack, update: list[float], count: int) -> None:
    samples = Samples(torch.zeros(2, 1, 14, 14), torch.tensor([1, 2]))
    attacker = Attacker(attack, samples, classes=10, bright=1.0, clients=20, malicious=4)
    sent, reported = attacker.send(labels_as_update, lambda: HONEST[:, :2])
    np.testing.assert_allclose(sent, update, rtol=1e-6)
    assert reported == count
    assert attack in ATTACKS


def test_who_mimics_keeps_the_same_victim_in_later_rounds() -> None:
    attacker = Attacker("mimic", Samples(torch.zeros(1, 1, 14, 14), torch.zeros(1)), 10, 1.0, clients=6, malicious=2)
    first, _ = attacker.send(labels_as_update, lambda: HONEST)
    second, _ = attacker.send(labels_as_update, lambda: HONEST[::-1])
    assert (first.tolist(), second.tolist()) == (HONEST[3].tolist(), HONEST[0].tolist())
