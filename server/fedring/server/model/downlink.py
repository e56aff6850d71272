"""Lossy deltas between models, with error feedback on the server.

The law: model + residual' == target + residual, up to the rounding of the residual. What the encoding leaves out of one
delta is added to the next one (Seide et al. 2014).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedring.codec import decode, encode
from fedring.codec.encoding import Encoding
from fedring.codec.errors import CodecError


@dataclass(frozen=True, slots=True, eq=False)
class DeltaStep:
    """A delta as it is sent, and the resulting model."""

    payload: bytes
    model: NDArray[np.float32]  # [n], what every client has after it
    residual: NDArray[np.float32]  # [n], what the encoding left out


def delta_step(
    base: NDArray[np.float32],
    target: NDArray[np.float32],
    residual: NDArray[np.float32] | None,
    encoding: Encoding,
) -> DeltaStep:
    """Encode the delta from `base` to `target` plus `residual`.

    Args:
        base: the parameters that clients hold, [n].
        target: the parameters of the next model before encoding, [n].
        residual: what the encoding left out of the deltas before, [n]; None if there is nothing.
        encoding: of the delta.

    Returns:
        The delta's payload; the next model, which is `apply_delta` of it; and the new residual.

    Raises:
        CodecError: "non_finite", if the delta, the model or the residual does not fit into float32.
    """
    wanted = target.astype(np.float64)
    if residual is not None:
        wanted += residual
    with np.errstate(over="ignore"):
        payload = encode((wanted - base).astype(np.float32), encoding)
        model = apply_delta(base, decode(payload, name=encoding.name, length=len(base)))
        wanted -= model
        left_out = wanted.astype(np.float32)
    if not np.isfinite(model).all() or not np.isfinite(left_out).all():
        raise CodecError("non_finite", "a parameter of the next model, by its encoded delta, does not fit into float32")
    return DeltaStep(payload, model, left_out)


def apply_delta(base: NDArray[np.float32], delta: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return base + delta, [n], exactly as a client computes it.

    There is one float32 addition for each value, so the result is equal bit for bit.
    """
    return np.add(base, delta, dtype=np.float32)
