"""Gaussian noise that follows from a secret key.

The same key always gives the same noise. A server that is killed between drawing noise and publishing the model adds
the same noise when it aggregates the same updates once more. With fresh noise, anybody who sees both models could
average the noise away.

The noise is the Box-Muller transform (Box and Muller 1958) of the key stream of AES-256 in counter mode, in float64.
Each pair of values has a place of its own in the stream, so that a vector can be drawn piece by piece. Floating-point
noise is not ideal: Mironov (2012) shows how much the lowest bits of a published value can reveal. A model is
rounded to float32 after the noise was added, which hides most, but not all, of that.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from fedring.privacy.keystream import KeyStream, check_secret


class Noise:
    """An endless sequence of independent values of the standard normal distribution.

    Args:
        secret: at least 32 bytes from the operating system's random numbers.
        context: the purpose of the noise; another context gives independent noise.
    """

    def __init__(self, secret: bytes, context: Iterable[str]) -> None:
        check_secret(secret)
        self._stream = KeyStream(secret, context)

    def normal(self, start: int, stop: int) -> NDArray[np.float64]:
        """Return the values from `start` to `stop`, [stop - start]."""
        first, last = start // 2, (stop + 1) // 2
        uniform = self.uniform(2 * first, 2 * last).reshape(-1, 2)
        radius, angle = np.sqrt(-2.0 * np.log(uniform[:, 0])), 2.0 * np.pi * uniform[:, 1]
        pairs = np.stack((radius * np.cos(angle), radius * np.sin(angle)), axis=1)
        return pairs.reshape(-1)[start - 2 * first : stop - 2 * first]

    def uniform(self, start: int, stop: int) -> NDArray[np.float64]:
        """Return the uniform values from `start` to `stop`, [stop - start].

        The normal values are made of them. They are independent, above 0 and at most 1. Use them, or the normal ones,
        of one context, but not both.
        """
        words = self._stream.words(start, stop)
        return ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
