"""What a server learns of single updates from the sum of their integers, if it knows what each client weighs.

It is asked a question about each value of each client, and gives the most probable answer (Bayes' rule). Beforehand, it
knows how long the values are, which it cannot know so well, but none of their signs. It also knows how clients make
integers of values: `Encode` is the code that is attacked. If unequal weights multiply a few levels, only one choice of
levels gives a sum, or few do: a knapsack of low density. The sum of clients with equal weights shows what cannot be
hidden.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.fft import irfft, rfft
from numpy.typing import NDArray
from scipy.fft import next_fast_len
from torch.utils.data import Dataset

from fedring.codec.schema import Vectors
from fedring.data.partition import labels_of, parts, subset
from fedring.train.loop import train
from fedring.train.losses import cross_entropy
from fedring.train.optimizers import sgd
from fedring.train.plan import Plan
from fedring.train.tensors.state import fill, read_vectors, schema_of
from fedring.v1 import secure_pb2 as wire
from tests.attacks.formulas import Float32

Integers = NDArray[np.int64]

Encode = Callable[[Float32, wire.SecureRound, int], Integers]
"""Takes the values of an update [n], the round and the weight; returns the integers, one each [n]."""

Ask = Callable[[NDArray[np.floating], int], Integers]
"""A question: takes values in levels, of any shape, and how many levels there are; returns right answers, from 0."""

BLOCK = 256

_CELLS = 4
"""So many equal cells of each interval that is rounded to one integer stand for all values in it."""

_QUANTILES = 513


def weighted_levels(values: Float32, secure: wire.SecureRound, weight: int) -> Integers:
    """Round values to levels, and multiply these by the weight: this opens."""
    steps = np.repeat(np.frombuffer(secure.scales, "<f4"), secure.block)[: len(values)]
    levels = np.clip(np.rint(values / steps), -secure.levels, secure.levels)
    return np.asarray(levels * min(weight, secure.max_weight), np.int64)


def signs_of(values: NDArray[np.floating], levels: int) -> Integers:
    """Ask which sign a value has: 1 if it is positive or 0."""
    return np.asarray(values >= 0, np.int64)


def levels_of(values: NDArray[np.floating], levels: int) -> Integers:
    """Ask which level is nearest to a value."""
    return np.asarray(np.clip(np.rint(values), -levels, levels) + levels, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """What a server knows of any value of a client before it sees a sum."""

    sent: Integers  # what the client may send, [m]
    chances: NDArray[np.float64]  # [m]
    answers: Integers  # to what is asked of the value, [m]


@dataclass(frozen=True, slots=True, eq=False)
class Scene:
    """A round whose sum is attacked."""

    updates: Float32  # of the clients, [clients, n]
    weights: Sequence[int]  # of the clients
    steps: Float32  # of each block, [blocks]
    levels: int = 7
    max_weight: int = 1000
    unit: float = 1.0  # how many steps one level has that is asked about

    def round_of(self, steps: Float32) -> wire.SecureRound:
        """Return what the command of a round with these steps says, [blocks]."""
        scales = steps.astype("<f4").tobytes()
        return wire.SecureRound(scales=scales, block=BLOCK, levels=self.levels, max_weight=self.max_weight)


def known(scene: Scene, encode: Encode, weight: int, sizes: NDArray[np.floating], ask: Ask) -> Known:
    """Return what a server knows of a client.

    Args:
        scene: the round; its updates and steps do not matter.
        encode: what clients do.
        weight: of the client.
        sizes: how long the values of all clients are, in steps, of any shape.
        ask: the question.
    """
    count = _CELLS * (scene.levels * scene.max_weight + weight)
    edges = np.arange(-count, count + 1) / (_CELLS * weight)
    edges[[0, -1]] = -np.inf, np.inf
    values = ((np.arange(-count, count) + 0.5) / (_CELLS * weight)).astype(np.float32)
    ones = scene.round_of(np.ones(-(-len(values) // BLOCK), np.float32))
    sent, answers = encode(values.copy(), ones, weight), ask(values / scene.unit, scene.levels)
    kinds = int(answers.max()) + 1
    pairs, places = np.unique(sent * kinds + answers, return_inverse=True)  # as one number each: quicker than rows
    sent, answers = np.divmod(pairs, kinds)
    chances = np.bincount(places, np.diff(_chance_below(edges, sizes))).astype(np.float64)
    return Known(sent, chances, answers)


def _chance_below(edges: NDArray[np.float64], sizes: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return how probable a value below each edge is, [m], if both signs are equally probable."""
    positive = sizes[sizes > 0]
    zeros = 1 - len(positive) / sizes.size
    shares = np.linspace(0, 1, _QUANTILES)
    lengths = np.quantile(positive, shares)
    lengths[0] = 0.0
    longer = np.interp(np.abs(edges), lengths, shares)
    return 0.5 + 0.5 * np.sign(edges) * (zeros + (1 - zeros) * longer)


def best_answers(sums: Integers, clients: Sequence[Known]) -> Integers:
    """Return the most probable answer about each client's part of each sum, [clients, sums]."""
    size = int(next_fast_len(2 * sum(int(np.abs(client.sent).max()) for client in clients) + 1) or 0)

    def spectrum(client: Known, chosen: NDArray[np.bool_] | slice = slice(None)) -> NDArray[np.complex128]:
        return np.asarray(rfft(np.bincount(client.sent[chosen] % size, client.chances[chosen], size)), np.complex128)

    spectra = [spectrum(client) for client in clients]
    found = np.empty((len(clients), len(sums)), np.int64)
    for number, client in enumerate(clients):
        others = np.prod(spectra[:number] + spectra[number + 1 :], axis=0)
        known_answers = np.unique(client.answers)
        # How probable a sum is together with each answer, for all sums at once: a convolution.
        chances = [
            irfft(others * spectrum(client, client.answers == each), size)[sums % size] for each in known_answers
        ]
        found[number] = known_answers[np.argmax(chances, axis=0)]
    return found


@dataclass(frozen=True, slots=True)
class Decoded:
    """How much of single updates was told by their sum, in percent."""

    signs: float  # of the values other than 0
    levels: float  # of all clients' values, at places at which any of them is not 0
    exact: float  # of these places: those at which the levels of all clients are right


def attack(scene: Scene, encode: Encode, places: Integers) -> Decoded:
    """Attack the sum of a round.

    Args:
        scene: the round.
        encode: what clients do.
        places: at which the sum is attacked, [m]; their values are distributed alike.
    """
    round_ = scene.round_of(scene.steps)
    sent = [encode(update.copy(), round_, weight) for update, weight in zip(scene.updates, scene.weights, strict=True)]
    sums = np.sum(sent, axis=0)[places]
    values = scene.updates[:, places] / np.repeat(scene.steps, BLOCK)[places]
    live = (values != 0).any(axis=0)
    right = []
    for ask in (signs_of, levels_of):
        of_weight = {weight: known(scene, encode, weight, np.abs(values), ask) for weight in set(scene.weights)}
        found = best_answers(sums, [of_weight[weight] for weight in scene.weights])
        right.append(found == ask(values / scene.unit, scene.levels))
    signs, levels = right
    shares = (signs[values != 0].mean(), levels[:, live].mean(), levels[:, live].all(axis=0).mean())
    return Decoded(*(round(100 * float(share), 1) for share in shares))


def equal(scene: Scene) -> Scene:
    """Return the round as it would be if all clients had the same weight: what a sum cannot hide."""
    return replace(scene, weights=[round(float(np.mean(scene.weights)))] * len(scene.weights))


def wide(scene: Scene, places: Integers) -> Scene:
    """Return the round with steps at which no value at these places is cut: it says what any weighted mean says."""
    values = scene.updates[:, places] / np.repeat(scene.steps, BLOCK)[places]
    factor = float(np.abs(values).max()) * max(scene.weights) / (scene.levels * scene.max_weight)
    return replace(scene, steps=(scene.steps * factor).astype(np.float32), unit=1 / factor) if factor > 1 else scene


def honest_steps(aggregate: NDArray[np.floating]) -> Float32:
    """Return the steps that an honest server takes after an aggregate [n], [blocks] (docs/configuration.md, step)."""
    squares = np.add.reduceat(np.square(aggregate, dtype=np.float64), np.arange(0, len(aggregate), BLOCK))
    sizes = np.minimum(BLOCK, len(aggregate) - np.arange(0, len(aggregate), BLOCK))
    changes = np.sqrt(squares / sizes)
    return np.asarray(np.maximum(changes, np.sqrt(np.mean(np.square(changes))) / 8), np.float32)


def second_round(
    model: torch.nn.Module, samples: Dataset[Any], sizes: Sequence[int], *, partition: str, seed: int
) -> tuple[Float32, Float32]:
    """Train two rounds of a federation, and return the updates of the second [clients, n], and the honest steps.

    Args:
        model: what is trained, which is overwritten.
        samples: of all clients.
        sizes: how many of them each client has.
        partition: how they are divided, as a job says it.
        seed: of the division and the training.
    """
    drawn = np.random.default_rng(seed)
    labels = labels_of(samples, "dirichlet")
    pool = np.sort(drawn.permutation(len(labels))[: max(sizes) * len(sizes)])
    held = parts(partition, labels[pool], count=len(sizes), alpha=0.3, seed=seed)
    own = [subset(samples, pool[drawn.permutation(part)[:size]]) for part, size in zip(held, sizes, strict=True)]
    schema, base = schema_of(model), read_vectors(model)
    start = base.parameters.copy()

    def trained(round_: int) -> Float32:
        updates = np.empty((len(own), len(start)), np.float32)
        for number, part in enumerate(own):
            fill(model, schema, Vectors(start.copy(), base.buffers))
            plan = Plan(seed=1000 * round_ + number)
            train(model, part, plan, loss=cross_entropy, optimizer_factory=sgd, device=torch.device("cpu"))
            updates[number] = read_vectors(model).parameters - start
        return updates

    before, start = start, (start + np.average(trained(0), axis=0, weights=sizes)).astype(np.float32)
    return trained(1), honest_steps(start - before)
