"""The step from one model to the next as a compressed delta, with error feedback on the server.

The law: model + residual' == target + residual, up to the rounding of the residual.
What the encoding loses in this step is added to the next one.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedring.codec import decode, encode
from fedring.codec.encoding import Encoding


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A step as it is sent, and where it leads."""

    payload: bytes
    model: NDArray[np.float32]  # [n], what every client has after it
    residual: NDArray[np.float32]  # [n], what is still owed


def delta_step(
    base: NDArray[np.float32],
    target: NDArray[np.float32],
    residual: NDArray[np.float32] | None,
    encoding: Encoding,
) -> Step:
    """The step from `base` towards `target` plus what is owed, all [n]; the model is `apply_delta` of the payload."""
    wanted = target.astype(np.float64)
    if residual is not None:
        wanted += residual
    payload = encode((wanted - base).astype(np.float32), encoding)
    model = apply_delta(base, decode(payload, name=encoding.name, length=len(base)))
    wanted -= model
    return Step(payload, model, wanted.astype(np.float32))


def apply_delta(base: NDArray[np.float32], delta: NDArray[np.float32]) -> NDArray[np.float32]:
    """One float32 addition per value, [n]: what a client does, bit for bit, with a decoded delta."""
    return np.add(base, delta, dtype=np.float32)
