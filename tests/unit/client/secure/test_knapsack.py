"""A sum tells of single updates what no weighted sum can hide, and nothing more, whatever steps a server takes."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from tests.attacks.formulas import Float32
from tests.attacks.knapsack import (
    BLOCK,
    Decoded,
    Integers,
    Scene,
    attack,
    equal,
    second_round,
    weighted_levels,
    wide,
)

from fedring.client.secure.protection import level_integers
from fedring.data import digits
from fedring.train.models import digits_mlp
from fedring.v1 import secure_pb2 as wire

TOLERANCE = 3.0  # percent, of the values of the three to ten clients at 400 places
STEPS = {"honest": 1.0, "small": 0.1, "tiny": 1e-4, "huge": 30.0}  # times those of an honest server


def product(values: Float32, secure: wire.SecureRound, weight: int) -> Integers:
    """Make integers as clients do, whatever share of the values is cut."""
    return level_integers(values, secure, weight, None, dither=b"", max_clipped_share=1.0)[: len(values)].astype(
        np.int64
    )


@cache
def updates(clients: int, partition: str) -> tuple[Float32, Float32]:
    """Return the updates of clients of different sizes in their second round, and the honest steps."""
    torch.manual_seed(clients)
    sizes = [weight * 1400 // 175 // clients for weight in weights_of(clients)]
    return second_round(digits_mlp(), digits().train, sizes, partition=partition, seed=clients)


def weights_of(clients: int, largest: int = 175) -> list[int]:
    """Return unequal weights: the largest is at most 2.3 times the smallest."""
    drawn: list[int] = np.random.default_rng(clients).integers(round(largest / 2.3), largest + 1, clients).tolist()
    return drawn


def scene_of(clients: int, partition: str, factor: float, **settings: int) -> Scene:
    """Return a round whose steps are so many times the honest ones."""
    found, steps = updates(clients, partition)
    return Scene(
        found, weights_of(clients), (steps * factor).astype(np.float32), **{"levels": 3, "max_weight": 200, **settings}
    )


def places_of(scene: Scene, count: int = 400) -> Integers:
    """Return places at which the sum is attacked."""
    return np.random.default_rng(1).permutation(scene.updates.shape[1])[:count]


def check_floor(scene: Scene, places: Integers) -> None:
    """Assert that the sum tells what equal weights and steps without cuts would tell, and nothing more."""
    found = attack(scene, product, places)
    floors = [attack(other, product, places) for other in (equal(scene), wide(scene, places))]
    for name in Decoded.__slots__:
        floor = max(getattr(each, name) for each in floors)
        assert getattr(found, name) <= floor + TOLERANCE, (name, found, floors)


@pytest.mark.parametrize("factor", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("partition", ["iid", "dirichlet"])
@pytest.mark.parametrize("clients", [3, 5, 10])
def test_unequal_weights_tell_no_more_than_equal_ones(clients: int, partition: str, factor: float) -> None:
    scene = scene_of(clients, partition, factor)
    check_floor(scene, places_of(scene))


@pytest.mark.parametrize("clients", [3, 6])
def test_steps_that_differ_from_block_to_block_tell_no_more(clients: int) -> None:
    scene = scene_of(clients, "dirichlet", 1.0)
    kinds = np.random.default_rng(2).choice(list(STEPS.values()), len(scene.steps))
    mixed = replace(scene, steps=(scene.steps * kinds).astype(np.float32))
    of_places = np.repeat(kinds, BLOCK)[: scene.updates.shape[1]]
    for kind in STEPS.values():
        check_floor(mixed, np.flatnonzero(of_places == kind))


def test_three_clients_of_the_default_settings_tell_no_more() -> None:
    scene = replace(scene_of(3, "iid", 1.0, levels=7, max_weight=1000), weights=weights_of(3, 871))
    check_floor(scene, places_of(scene))


def test_the_attack_opens_levels_that_weights_multiply() -> None:
    default = replace(scene_of(3, "iid", 1.0, levels=7, max_weight=1000), weights=weights_of(3, 871))
    places = places_of(default)
    assert attack(default, weighted_levels, places).exact > 80
    assert attack(equal(default), weighted_levels, places).exact < 50
    signs = replace(scene_of(6, "dirichlet", 1e-4, levels=1, max_weight=1000), weights=weights_of(6, 871))
    assert attack(signs, weighted_levels, places).signs > 99
    assert attack(signs, product, places).signs < 75
