"""Federated averaging (McMahan et al. 2017, algorithm 1), an aggregation rule.

Clients are added in client-id order in float64, so the same updates give the same bytes, in whatever order they arrived
and however the walk is cut into tiles.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedring.server.model.rule import Scalars, Tile


@dataclass(frozen=True, slots=True)
class Mean:
    """The mean of the clients' deltas, weighted by their numbers of samples."""

    @property
    def first_walk(self) -> None:
        """None: each range is averaged by itself."""
        return None

    def combine(self, tile: Tile, scalars: Scalars) -> NDArray[np.float64]:
        """Return sum_i n_i f_i d_i / sum_i n_i, [n], where client i has n_i samples, the delta d_i and the factor f_i.

        Of a client that sends weights, d_i is the weights minus the base.
        """
        total = np.zeros(tile.stop - tile.start, np.float64)
        for client in tile.clients:
            client.add_to(total, tile.start, tile.stop, client.num_samples * client.factor)
        if absolute := sum(client.num_samples * client.factor for client in tile.clients if client.kind == "weights"):
            total -= np.multiply(tile.base, float(absolute), dtype=np.float64)
        total /= float(sum(client.num_samples for client in tile.clients))
        return total
