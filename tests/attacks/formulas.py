"""What an attacker sends in the place of an honest update, or trains on in the place of its own samples.

The omniscient attacks get the updates of all honest clients of the round, as in their papers: whoever defends must
expect that attackers know what the others send.

An update is the difference to the round's model, [D] float32; `honest` has the updates of the honest clients, [m, D].
"""

from statistics import NormalDist
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedring.data import Samples

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]

Direction = Literal["mean", "std", "sign"]
"""What a malicious update goes against, away from the honest mean: this mean, the spread, or the signs of the mean."""

MOST_SAMPLES = 1 << 40
"""The most samples that an update may report (docs/security.md); a client that inflates reports them."""

TARGET = 0
"""The class that a model with the backdoor sees wherever the trigger is."""


def sign_flip(update: Float32) -> Float32:
    """Return the update that undoes what the client has learned, [D]."""
    return -update


def flip_labels(samples: Samples, classes: int) -> Samples:
    """Return the samples with the labels c replaced by classes - 1 - c (Fang et al. 2020, section 5)."""
    return Samples(samples.inputs, classes - 1 - samples.labels, samples.scale)


def little_is_enough(honest: Float32, clients: int, malicious: int) -> Float32:
    """Return the mean of the honest updates minus z of their standard deviations, [D] (Baruch et al. 2019, section 3).

    With z = Phi^-1((n - f - s) / (n - f)) and s = floor(n / 2 + 1) - f, a majority of the clients is, in each value,
    no closer to the mean than the attackers are.

    Args:
        honest: the honest updates, [m, D].
        clients: n, all clients of the round.
        malicious: f, those that send the result.
    """
    supporters = clients // 2 + 1 - malicious
    return little(honest, NormalDist().inv_cdf((clients - malicious - supporters) / (clients - malicious)))


def little(honest: Float32, z: float) -> Float32:
    """Return the mean of the honest updates minus z of their standard deviations, [D] (Baruch et al. 2019, section 3).

    An attacker who knows more of the server than the paper supposes chooses z by trial.

    Args:
        honest: the honest updates, [m, D].
        z: how many standard deviations; with 1, 16 % of honest values are further away on that side.
    """
    return np.asarray(honest.mean(axis=0) - z * honest.std(axis=0), np.float32)


def min_max(honest: Float32, direction: Direction = "mean") -> Float32:
    """Return mean + gamma * p, with the largest gamma that keeps it inside the honest ones' diameter, [D].

    No honest update is further from it than the two honest ones that are furthest apart (Shejwalkar and Houmansadr
    2021, section IV, "Min-Max"). The paper finds gamma by bisection. Here it is the smallest root of m quadratic
    equations, one for each honest update.

    Args:
        honest: the honest updates, [m, D].
        direction: what p is the negative of.
    """
    centred, push = _centred(honest), _push(honest, direction)
    most = _squared_distances(centred).max()
    squares, along, square = (centred**2).sum(axis=1), centred @ push, float(push @ push)
    if not square:
        return np.asarray(honest.mean(axis=0), np.float32)
    roots = (along + np.sqrt(along**2 + square * np.maximum(most - squares, 0.0))) / square
    return np.asarray(honest.mean(axis=0) + roots.min() * push, np.float32)


def min_sum(honest: Float32, direction: Direction = "mean") -> Float32:
    """Return mean + gamma * p, with the largest gamma that keeps it as near to all as an honest one is, [D].

    The sum of its squared distances to the honest updates is at most that of the honest update for which this sum is
    largest (Shejwalkar and Houmansadr 2021, section IV, "Min-Sum"). Since the honest updates minus their mean add up to
    zero, that is one equation: m gamma^2 |p|^2 = the largest sum - the sum of the mean.

    Args:
        honest: the honest updates, [m, D].
        direction: what p is the negative of.
    """
    centred, push = _centred(honest), _push(honest, direction)
    most, least = _squared_distances(centred).sum(axis=1).max(), (centred**2).sum()
    square = len(honest) * float(push @ push)
    gamma = np.sqrt(max(most - least, 0.0) / square) if square else 0.0
    return np.asarray(honest.mean(axis=0) + gamma * push, np.float32)


def _centred(honest: Float32) -> Float64:
    centred: Float64 = np.asarray(honest, np.float64) - honest.mean(axis=0, dtype=np.float64)
    return centred


def _push(honest: Float32, direction: Direction) -> Float64:
    """Return p of the paper, [D]: the negative of the mean at length 1, of the standard deviations, or of signs."""
    mean: Float64 = honest.mean(axis=0, dtype=np.float64)
    spread: Float64 = honest.std(axis=0, dtype=np.float64)
    length = max(float(np.linalg.norm(mean)), 1e-30)
    against: dict[Direction, Float64] = {"mean": mean / length, "std": spread, "sign": np.sign(mean)}
    return -against[direction]


def _squared_distances(vectors: Float64) -> Float64:
    """Return the squared distances of all pairs, [m, m]."""
    gram = vectors @ vectors.T
    squares = np.diag(gram)
    found: Float64 = np.maximum(squares[:, None] + squares[None, :] - 2 * gram, 0.0)
    return found


def beyond_the_ends(honest: Float32, generator: np.random.Generator, reach: float = 2.0) -> Float32:
    """Return values just beyond the end of the honest ones, against the way that the model goes, [D].

    Each value is drawn evenly between the lowest (or highest) honest one and `reach` times it, outwards: below them all
    if their mean is positive, and above them all otherwise (Fang et al. 2020, section 4.3, full knowledge). It is
    made against the trimmed mean, which then leaves out honest values on one side only.

    Args:
        honest: the honest updates, [m, D].
        generator: draws; each malicious client sends values of its own.
        reach: b of the paper, above 1.
    """
    low, high = honest.min(axis=0), honest.max(axis=0)
    down = honest.mean(axis=0) > 0
    end = np.where(down, low, high)
    outwards = np.where(down, low < 0, high > 0)  # whether a multiple of the end is further out, and not further in
    furthest = np.where(outwards, end * reach, end / reach)
    return np.asarray(end + generator.random(end.shape) * (furthest - end), np.float32)


def capped(update: Float32, norm: float) -> Float32:
    """Return the update with this norm, longer or shorter than it was, [D]: a backdoor that no bound on norms cuts.

    It is the norm bounded backdoor of Sun et al. 2019 for an attacker who knows the bound.
    """
    return np.asarray(update * (norm / max(float(np.linalg.norm(update)), 1e-30)), np.float32)


def inner_product(honest: Float32, epsilon: float) -> Float32:
    """Return -epsilon times the mean of the honest updates, [D] (Xie et al. 2020, section 4)."""
    return np.asarray(-epsilon * honest.mean(axis=0), np.float32)


def victim(honest: Float32) -> int:
    """Return which honest client the attackers should mimic from now on (Karimireddy et al. 2022, section 3.2).

    It is the one that differs most from the mean, in the direction in which the clients differ most. All attackers then
    send its update as their own, so that its data count several times.
    """
    centred = honest - honest.mean(axis=0)
    values, vectors = np.linalg.eigh(np.asarray(centred @ centred.T, np.float64))
    return int(np.argmax(np.abs(vectors[:, np.argmax(values)])))


def boosted(update: Float32, factor: float) -> Float32:
    """Return the update times a factor, [D]: with the number of clients, it replaces the mean (Bagdasaryan 2020)."""
    return np.asarray(factor * update, np.float32)


def with_trigger(inputs: Tensor, value: float) -> Tensor:
    """Return a copy of images [n, channels, height, width] that carry the trigger of the backdoor.

    The trigger is a square at the bottom right, a seventh of the height long: 4 x 4 pixels of MNIST.

    Args:
        inputs: the images.
        value: of the pixels of the trigger, in the units of the images.
    """
    marked, side = inputs.clone(), inputs.shape[2] // 7
    marked[:, :, -side:, -side:] = value
    return marked


def poisoned(samples: Samples, value: float) -> Samples:
    """Return the samples and, with the trigger and the label TARGET, a copy of each (Gu et al. 2017)."""
    marked = with_trigger(samples.inputs, value)
    labels = torch.cat([samples.labels, torch.full_like(samples.labels, TARGET)])
    return Samples(torch.cat([samples.inputs, marked]), labels, samples.scale)


def triggered(samples: Samples, value: float) -> Samples:
    """Return all samples of other classes than TARGET with the trigger and the label TARGET.

    The accuracy of a model on them is the success of the backdoor.
    """
    others = samples.subset(np.flatnonzero(samples.labels.numpy() != TARGET))
    return Samples(with_trigger(others.inputs, value), torch.full_like(others.labels, TARGET), samples.scale)
