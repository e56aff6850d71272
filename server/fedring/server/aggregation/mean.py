"""Weighted sums of updates, among them federated averaging.

McMahan et al. 2017, algorithm 1. Clients are added in client-id order in float64, so the same updates give the same
bytes, in whatever order they arrived and however the walk is cut into tiles.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedring.server.aggregation.contributions import ClientVector, Values


def weighted_mean(
    base: Values, clients: Sequence[ClientVector], weights: Sequence[float], divisor: float, start: int
) -> NDArray[np.float64]:
    """Return sum_i w_i d_i / divisor, [n].

    Client i has the weight w_i and the delta d_i. Of a client that sends weights, d_i is the weights minus the base. A
    client of weight 0 is not read.

    Args:
        base: the base model's values of a range, [n].
        clients: the updates, in client-id order.
        weights: of each client; its delta's factor is multiplied by it.
        divisor: of the sum.
        start: where the range begins.
    """
    total, stop = np.zeros(len(base), np.float64), start + len(base)
    absolute = 0.0
    for client, weight in zip(clients, weights, strict=True):
        if scaled := weight * client.factor:
            client.add_to(total, start, stop, scaled)
            absolute += scaled if client.kind == "weights" else 0.0
    if absolute:
        total -= np.multiply(base, absolute, dtype=np.float64)
    total /= divisor
    return total
