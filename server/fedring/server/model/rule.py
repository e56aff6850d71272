"""Aggregation rules: what turns the updates of a round into one delta, which is added to the base model.

A rule is a pure object that computes one range (a tile) at a time. It sees the values of the base model and those of
each client in that range, and returns the delta of that range. `fedring.server.model.aggregate` walks over the model,
several tiles at a time, and does all that follows: adding the delta or stepping a server optimizer, rounding, encoding
and sealing.

A rule that must look at whole updates before it can combine them, for a norm or a distance, has a first walk. It
reduces all tiles to one number for each client, so that its memory does not grow with the model.

The law that each rule keeps: the result depends on the base, the plan and the set of updates only, byte for byte. So a
rule has no clock, no randomness but what its arguments seed, and no state that a call changes. It must not depend on
the order in which updates arrived or threads finish, nor on how often a tile is computed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fedring.server.model.contributions import ClientVector, Values

Scalars = Mapping[str, float]
"""One number for each client that sends parameters, by client id. It is empty without a first walk."""


@dataclass(frozen=True, slots=True)
class Tile:
    """One range of the parameters or of the buffers, as a rule sees it."""

    start: int
    stop: int
    base: Values  # the base model's values, [stop - start], not to be written to
    clients: Sequence[ClientVector]  # in client-id order, at least one; those that send this vector


class FirstWalk(Protocol):
    """The first of two walks: it reduces the parameters of all updates to one number for each client.

    Every update is read twice then.
    """

    def measure(self, tile: Tile) -> NDArray[np.float64]:
        """Return what one tile adds to the measure of all updates.

        Called from several threads. The arrays of all tiles have one shape, which does not depend on the size of the
        model: [clients] for squared norms, [clients, clients] for a Gram matrix. They are added up in the order of
        the tiles.
        """
        ...

    def scalars(self, clients: Sequence[ClientVector], total: NDArray[np.float64]) -> Scalars:
        """Return the number of each client, from the sum of what `measure` returned."""
        ...


class Rule(Protocol):
    """A rule that turns the updates of a round into one delta. The module states the law that it keeps."""

    @property
    def first_walk(self) -> FirstWalk | None:
        """The walk before the one that combines; None if each range can be combined by itself."""
        ...

    def combine(self, tile: Tile, scalars: Scalars) -> NDArray[np.float64]:
        """Return the delta of one range, which is added to the base.

        Called from several threads, once for each tile of the parameters and of the buffers. What it holds at a time
        should not exceed a few arrays of the tile's size; a rule that needs the values of all clients side by side
        can read the range in smaller pieces.

        Args:
            tile: the range.
            scalars: what the first walk has found.

        Returns:
            A new array, [tile.stop - tile.start], which the caller may overwrite. A value that is not finite ends
            the aggregation with an error.
        """
        ...
