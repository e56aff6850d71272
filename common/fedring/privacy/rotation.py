"""The randomised Hadamard transform, block by block (Kairouz, Liu, Steinke 2021).

Each block of values is multiplied with random signs and with the orthonormal Hadamard matrix. No norm changes, and the
energy of a block is spread over all of its values, whatever it was, so that none of them is much larger than the root
of their mean square. The signs follow from a public seed.
"""

import numpy as np
from numpy.typing import NDArray

from fedring.privacy.keystream import KeyStream

_BITS = 8
_PIECE = 2**17
"""How many values are transformed at once, so that they stay in the processor's cache."""


class Rotation:
    """A rotation of a vector, applied piece by piece.

    The vector's length is a multiple of the block.

    Args:
        seed: draws the signs; everybody who has it can undo the rotation.
        block: how many values are rotated together, a power of two of at least 8.
    """

    def __init__(self, seed: bytes, block: int) -> None:
        if block < _BITS or block & (block - 1):
            raise ValueError(f"a block of {block} values is not a power of two of at least {_BITS}")
        self._block = block
        self._signs = KeyStream(seed, ["rotation"])

    def apply(self, values: NDArray[np.float64], start: int) -> None:
        """Rotate a piece of the vector in place.

        Args:
            values: [n], n a multiple of the block.
            start: the place of its first value in the vector, a multiple of the block.
        """
        for piece, place in self._pieces(values, start):
            piece *= self._sign(place, len(piece))
            self._hadamard(piece)

    def undo(self, values: NDArray[np.float64], start: int) -> None:
        """Undo the rotation of a piece of the vector in place.

        The arguments are those of `apply`.
        """
        for piece, place in self._pieces(values, start):
            self._hadamard(piece)
            piece *= self._sign(place, len(piece))

    def _pieces(self, values: NDArray[np.float64], start: int) -> list[tuple[NDArray[np.float64], int]]:
        if start % self._block or len(values) % self._block:
            raise ValueError(f"{len(values)} values from {start} on are not whole blocks of {self._block}")
        size = max(self._block, _PIECE)
        return [(values[at : at + size], start + at) for at in range(0, len(values), size)]

    def _sign(self, start: int, count: int) -> NDArray[np.float64]:
        drawn = self._signs.read(start // _BITS, (start + count) // _BITS)
        return 1.0 - 2.0 * np.unpackbits(np.frombuffer(drawn, np.uint8)).astype(np.float64)

    def _hadamard(self, values: NDArray[np.float64]) -> None:
        """Apply the fast Walsh-Hadamard transform to each block."""
        half = 1
        while half < self._block:
            pairs = values.reshape(-1, 2, half)
            difference = pairs[:, 0] - pairs[:, 1]
            pairs[:, 0] += pairs[:, 1]
            pairs[:, 1] = difference
            half *= 2
        values *= self._block**-0.5
