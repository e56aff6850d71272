"""The format int8: dense levels in ±127, one scale a chunk.

HEADER   scales[ceil(dim / chunk)] f32   levels[dim] i8
"""

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from fedring.codec.chunks import dequantise, quantised_blocks
from fedring.codec.decoder import Decoder
from fedring.codec.source import HEADER, VERSION, Source, check_chunk, check_length

_MAGIC = b"Q8"


def encode_int8(vector: NDArray[np.float32], chunk: int) -> bytes:
    """Encode `vector` [D] float32; CodecError("non_finite") for NaN or infinity."""
    blocks = list(quantised_blocks(vector, chunk))
    header = HEADER.pack(_MAGIC, 0, VERSION, chunk, vector.size)
    scales = [scales.astype("<f4", copy=False).data for _, scales in blocks]
    return b"".join([header, *scales, *(levels.data for levels, _ in blocks)])


class Int8Decoder(Decoder):
    """An open payload of int8.

    Args:
        source: The bytes.
        length: The number of entries that the receiver expects.
    """

    seeks: ClassVar[bool] = True

    def __init__(self, source: Source, length: int) -> None:
        chunk, dim = source.header(HEADER, _MAGIC)
        self._chunk = check_chunk(chunk)
        check_length(dim, length)
        self._source = source
        self._levels = HEADER.size + 4 * -(-dim // chunk)
        source.demand(self._levels + dim)

    def decode(self, start: int, stop: int) -> NDArray[np.floating]:
        """See Decoder.decode; "bad_scale" if a scale could make a value infinite."""
        first, last = start // self._chunk, -(-stop // self._chunk)
        scales = self._source.floats(HEADER.size + 4 * first, max(0, last - first))
        levels = np.frombuffer(self._source.piece(self._levels + start, stop - start), np.int8)
        return dequantise(levels, scales, self._chunk, start - first * self._chunk)
