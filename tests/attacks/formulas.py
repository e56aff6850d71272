"""What an attacker sends in the place of an honest update, or trains on in the place of its own samples.

The omniscient attacks (`little_is_enough`, `inner_product`, `victim`) get the updates of all honest clients of the
round, as in their papers: whoever defends must expect that attackers know what the others send.

An update is the difference to the round's model, [D] float32; `honest` has the updates of the honest clients, [m, D].
"""

from statistics import NormalDist

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedring.data import Samples

Float32 = NDArray[np.float32]

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
    z = NormalDist().inv_cdf((clients - malicious - supporters) / (clients - malicious))
    return np.asarray(honest.mean(axis=0) - z * honest.std(axis=0), np.float32)


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
