"""What every payload offers once it is open: its values, range by range."""

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray


class Decoder(ABC):
    """An open payload. It holds no values; each range is read, checked and decoded anew."""

    @abstractmethod
    def decode(self, start: int, stop: int) -> NDArray[np.floating]:
        """Entries start..stop, dense, [stop - start] float32 (fp64: float64).

        The array is new, except that of fp32 and fp64, which is a read-only view of the bytes read.
        """

    def add(self, start: int, stop: int, out: NDArray[np.float64], weight: float) -> None:
        """`out`, [stop - start], has grown by `weight` times the entries start..stop, in float64."""
        out += np.multiply(self.decode(start, stop), weight, dtype=np.float64)


class SparseDecoder(Decoder):
    """An open payload that carries only some entries; the others are zero."""

    @abstractmethod
    def entries(self, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Positions, counted from `start` and strictly rising, and values of the entries carried in start..stop."""

    def decode(self, start: int, stop: int) -> NDArray[np.floating]:
        """Entries start..stop in a new array, [stop - start] float32."""
        out = np.zeros(stop - start, np.float32)
        positions, values = self.entries(start, stop)
        out[positions] = values
        return out

    def add(self, start: int, stop: int, out: NDArray[np.float64], weight: float) -> None:
        """As Decoder.add, at the cost of the entries carried alone."""
        positions, values = self.entries(start, stop)
        out[positions] += np.multiply(values, weight, dtype=np.float64)
