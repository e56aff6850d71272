"""Error feedback (Seide et al. 2014, section 3; Karimireddy et al. 2019, algorithm 1).

The one law: nothing is lost. What a payload leaves out stays in the residual, so

    decode(payload) + residual' == update + residual

within the rounding of one float32 addition and one subtraction.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedring.codec import STATELESS, TILE, Encoding, encode, open_payload


@dataclass(frozen=True, slots=True, eq=False)
class Compressed:
    """What to send, and what to add to the next update once this one is accepted."""

    payload: bytes
    residual: NDArray[np.float32] | None  # [D]; None if the encoding keeps none


def compress(update: NDArray[np.float32], residual: NDArray[np.float32] | None, encoding: Encoding) -> Compressed:
    """`update` [D] plus `residual` [D] as a payload, and what that leaves out; neither argument is changed.

    An encoding of STATELESS sends the residual along and leaves none.
    """
    target = update if residual is None else update + residual
    payload = encode(target, encoding)
    if encoding.name in STATELESS:
        return Compressed(payload, None)
    return Compressed(payload, _left_out(target, payload, encoding.name))


def _left_out(target: NDArray[np.float32], payload: bytes, name: str) -> NDArray[np.float32]:
    """`target` less what a receiver of `payload` decodes, [D]."""
    view = memoryview(payload)
    decoder = open_payload(lambda offset, size: view[offset : offset + size], len(view), name=name, length=target.size)
    rest = np.empty(target.size, np.float32)
    for start in range(0, target.size, TILE):
        tile = slice(start, min(start + TILE, target.size))
        np.subtract(target[tile], decoder.decode(tile.start, tile.stop), out=rest[tile])
    return rest
