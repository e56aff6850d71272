"""Error feedback of updates.

See Seide et al. 2014, section 3; Karimireddy et al. 2019, algorithm 1.

The law is that nothing is lost. What a payload leaves out stays in the residual, so that

    decode(payload) + residual' == update + residual

within the rounding of one float32 addition and one subtraction.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedring.codec import STATELESS, TILE, Encoding, encode, open_payload


@dataclass(frozen=True, slots=True, eq=False)
class Compressed:
    """A payload to send, and the residual for the next update.

    The residual is used as soon as this update is accepted.
    """

    payload: bytes
    residual: NDArray[np.float32] | None  # [D]; None if the encoding leaves none


def compress(update: NDArray[np.float32], residual: NDArray[np.float32] | None, encoding: Encoding) -> Compressed:
    """Encode an update together with the residual of earlier ones.

    Args:
        update: The update [D] float32, which is not changed.
        residual: What earlier payloads left out [D] float32, which is not changed; None if there is nothing.
        encoding: How to encode. A stateless encoding sends the residual, too, but leaves no new one.

    Returns:
        The payload and the new residual.

    Raises:
        CodecError: "non_finite" if the sum has NaN or infinity.
    """
    target = update if residual is None else update + residual
    payload = encode(target, encoding)
    if encoding.name in STATELESS:
        return Compressed(payload, None)
    return Compressed(payload, _left_out(target, payload, encoding.name))


def _left_out(target: NDArray[np.float32], payload: bytes, name: str) -> NDArray[np.float32]:
    """Return `target` [D] less the values decoded from `payload`."""
    view = memoryview(payload)
    decoder = open_payload(lambda offset, size: view[offset : offset + size], len(view), name=name, length=target.size)
    rest = np.empty(target.size, np.float32)
    for start in range(0, target.size, TILE):
        tile = slice(start, min(start + TILE, target.size))
        np.subtract(target[tile], decoder.decode(tile.start, tile.stop), out=rest[tile])
    return rest
