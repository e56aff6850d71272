"""How a vector is to be encoded: a name and its parameters, checked once."""

from dataclasses import dataclass
from math import isfinite

from fedring.codec.errors import CodecError

TILE = 1 << 20
"""Entries that are decoded at a time: the unit of every walk over a vector."""

NAMES = ("fp32", "fp16", "bf16", "int8", "fp32_sparse", "sq8", "packed", "uniform")
"""Encodings a job may name, for parameters."""

BUFFERS = "fp64"
"""The encoding of buffers: dense and exact."""

DELTA_ONLY = frozenset({"fp32_sparse", "sq8", "packed"})
"""Encodings that leave entries out, and so can only carry a difference."""

STATELESS = frozenset({"fp32", "uniform"})
"""Encodings whose sender keeps no residual."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """A name from NAMES and the parameters that it takes; the others are ignored."""

    name: str
    chunk: int = 8192  # values per scale, 1 to TILE
    keep_ratio: float = 0.1  # kept share of the entries, (0, 1]
    step: float = 1.0  # quantisation step over the chunk's root mean square, > 0

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise CodecError("unknown_encoding", f"{self.name!r} is none of {', '.join(NAMES)}")
        if not 1 <= self.chunk <= TILE:
            raise CodecError("bad_encoding", f"chunk {self.chunk} is not in 1..{TILE}")
        if not (isfinite(self.keep_ratio) and 0 < self.keep_ratio <= 1):
            raise CodecError("bad_encoding", f"keep_ratio {self.keep_ratio} is not in (0, 1]")
        if not (isfinite(self.step) and 0 < self.step <= 1000):
            raise CodecError("bad_encoding", f"step {self.step} is not in (0, 1000]")
