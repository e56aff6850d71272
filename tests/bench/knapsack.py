"""Measure what the sum of updates with unequal weights tells of single ones.

    python -m tests.bench.knapsack --data-root DIR [--clients 3,4,5,6,8,10] [--places 2000] [--smallest 379]

Clients with 379 to 871 samples of MNIST train a perceptron for two rounds, and the sum of the second is attacked
(tests/attacks/knapsack.py): with IID samples and with Dirichlet 0.3, at the steps of an honest server, at smaller and
larger ones, and at steps that differ from block to block. Prints a JSON line for each: what is decoded of the integers
that clients send, of levels that are multiplied by weights, and of what no sum can hide, which is what equal weights
tell, or steps at which nothing is cut.
"""

import argparse
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch

from fedring.client.secure.protection import level_integers
from fedring.data import mnist
from fedring.secure.levels import to_integers
from fedring.v1 import secure_pb2 as wire
from tests.attacks.formulas import Float32
from tests.attacks.knapsack import BLOCK, Integers, Scene, attack, equal, second_round, weighted_levels, wide
from tests.bench.lab.daemons import print_line
from tests.bench.robust import mlp

LARGEST = 871
STEPS = {"honest": 1.0, "smaller": 0.1, "small": 0.03, "tiny": 1e-4, "huge": 30.0}
MIXED = ("small", "tiny")
"""The kinds of blocks that are attacked in a round whose steps differ."""


def product(values: Float32, secure: wire.SecureRound, weight: int) -> Integers:
    """Make integers as clients do, whatever share of the values is cut."""
    return level_integers(values, secure, weight, None, dither=b"", max_clipped_share=1.0)[: len(values)].astype(
        np.int64
    )


def clipped_share(scene: Scene) -> float:
    """Return the mean share of the clients' values that are cut."""
    secure, pairs = scene.round_of(scene.steps), zip(scene.updates, scene.weights, strict=True)
    return float(np.mean([to_integers(update.copy(), secure, weight).clipped_share for update, weight in pairs]))


def scenes(scene: Scene, count: int) -> Iterator[tuple[str, Scene, Integers]]:
    """Yield rounds of the same updates with other steps, and at which places to attack them."""
    drawn = np.random.default_rng(1)
    places = drawn.permutation(scene.updates.shape[1])[:count]
    for name, factor in STEPS.items():
        yield name, replace(scene, steps=(scene.steps * factor).astype(np.float32)), places
    kinds = drawn.choice(list(STEPS.values()), len(scene.steps))
    mixed = replace(scene, steps=(scene.steps * kinds).astype(np.float32))
    of_places = np.repeat(kinds, BLOCK)[: scene.updates.shape[1]]
    for name in MIXED:
        yield f"{name} blocks", mixed, drawn.permutation(np.flatnonzero(of_places == STEPS[name]))[:count]


def main() -> None:
    """Print a JSON line for each round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, help="folder of the data sets")
    parser.add_argument("--clients", default="3,4,5,6,8,10", help="numbers of clients, with commas between")
    parser.add_argument("--partitions", default="iid,dirichlet", help="how samples are divided")
    parser.add_argument("--places", type=int, default=2000, help="parameters at which a sum is attacked")
    parser.add_argument("--smallest", type=int, default=379, help="samples of the client with the fewest")
    parser.add_argument("--levels", type=int, default=7, help="levels of the round")
    options = parser.parse_args()
    train = mnist(options.data_root).train
    for partition in options.partitions.split(","):
        for clients in map(int, options.clients.split(",")):
            torch.manual_seed(clients)
            weights = np.random.default_rng(clients).integers(options.smallest, LARGEST + 1, clients).tolist()
            updates, steps = second_round(mlp(), train, weights, partition=partition, seed=clients)
            whole = Scene(updates, weights, steps, levels=options.levels)
            for name, scene, places in scenes(whole, options.places):
                found = {
                    "sent": attack(scene, product, places),
                    "weights_after_rounding": attack(scene, weighted_levels, places),
                    "equal_weights": attack(equal(scene), product, places),
                    "equal_levels": attack(equal(scene), weighted_levels, places),
                    "not_cut": attack(wide(scene, places), product, places),
                }
                told = {key: asdict(decoded) for key, decoded in found.items()}
                print_line(
                    {"clients": clients, "partition": partition, "steps": name, "cut": clipped_share(scene), **told}
                )


if __name__ == "__main__":
    main()
