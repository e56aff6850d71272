"""Aggregation rules, which combine a round's updates into one delta.

The delta is added to the base model. A rule is a pure object with one of two methods. The first kind gives each update
one coefficient, and the delta is the sum of the updates times their coefficients. All it sees of the updates is their
Gram matrix, from which norms, angles and distances follow, so its memory does not grow with the model. The second kind
sees the values of all updates side by side, in a small piece of the model at a time.
`fedring.server.aggregation.combining` walks over the model for both.

The law that each rule keeps: the result depends on its input only, byte for byte. So a rule has no clock, no
randomness but what its arguments seed, and no state that a call changes. Updates always come in the order of their
clients' ids, or of the buckets that these are put into, whatever the order in which they arrived.
"""

from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]


@runtime_checkable
class GramRule(Protocol):
    """A rule that gives each update one coefficient.

    The buffers of the model, of which the Gram matrix knows nothing, are combined by their coordinate-wise median.
    """

    def coefficients(self, gram: Float64, weights: Float64) -> Float64:
        """Return the coefficients of the updates, [n] float64.

        Args:
            gram: the inner products of the updates' deltas, [n, n] float64, symmetric.
            weights: what the job lets each update count, [n] float64, above 0, with the sum 1.
        """
        ...


@runtime_checkable
class CoordinateRule(Protocol):
    """A rule that combines the values of all updates, coordinate by coordinate."""

    def combine(self, deltas: Float64, weights: Float64) -> Float64:
        """Return the combined values of a piece of the model, [m] float64.

        Called from several threads, for pieces of the parameters and of the buffers; where a piece begins and ends
        must not change the result.

        Args:
            deltas: the updates' values, [n, m] float64, not to be written to.
            weights: what the job lets each update count, [n] float64, above 0, with the sum 1.
        """
        ...


Rule = GramRule | CoordinateRule


class OptimizerError(ValueError):
    """The server optimizer, its arguments or its saved state cannot be used."""


class RuleError(Exception):
    """A rule cannot combine the updates of a round.

    Attributes:
        reason: a stable word for the round's row: "bad_rule", "too_few_clients", "out_of_memory", "no_server_update" or
            "none_trusted".
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
