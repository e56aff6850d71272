"""Encodings of vectors: their names, and their parameters, which are checked once."""

from dataclasses import dataclass
from math import isfinite

from fedring.codec.errors import CodecError

TILE = 1 << 20
"""Entries that are decoded at a time, wherever a vector is processed from its beginning to its end."""

NAMES = ("fp32", "fp16", "bf16", "int8", "fp32_sparse", "sq8", "packed", "uniform")
"""Encodings of parameters, which a job may name."""

BUFFERS = "fp64"
"""The encoding of buffers, dense and exact."""

DELTA_ONLY = frozenset({"fp32_sparse", "sq8", "packed"})
"""Encodings that leave entries out, and can therefore carry only differences."""

STATELESS = frozenset({"fp32", "uniform"})
"""Encodings whose sender keeps no residual."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """An encoding by name, with its parameters.

    Parameters that an encoding does not take are ignored.

    Making one raises CodecError, "unknown_encoding" or "bad_encoding", if a value does not fit.
    """

    name: str  # one of NAMES
    chunk: int = 8192  # values that share a scale, 1 to TILE
    keep_ratio: float = 0.1  # share of the entries that is kept, (0, 1]
    step: float = 1.0  # quantisation step divided by the root mean square of the chunk, (0, 1000]

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise CodecError("unknown_encoding", f"there is no encoding {self.name!r}: choose from {', '.join(NAMES)}")
        if not 1 <= self.chunk <= TILE:
            raise CodecError("bad_encoding", f"chunk {self.chunk} is not in 1..{TILE}")
        if not (isfinite(self.keep_ratio) and 0 < self.keep_ratio <= 1):
            raise CodecError("bad_encoding", f"keep_ratio {self.keep_ratio} is not in (0, 1]")
        if not (isfinite(self.step) and 0 < self.step <= 1000):
            raise CodecError("bad_encoding", f"step {self.step} is not in (0, 1000]")
