"""Attacks compute what their papers say. The figures with byzfl are those of byzfl 0.0.11 for the same updates."""

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
