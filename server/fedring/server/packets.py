"""Where each encoded vector of an update, or of a step between two models, lies in its payload."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Vector = Literal["parameters", "buffers"]
Kind = Literal["weights", "delta"]


@dataclass(frozen=True, slots=True)
class PacketSpec:
    """One encoded vector; packets of the same vector add up."""

    vector: Vector
    kind: Kind
    encoding: str  # a name of fedring.codec.encoding.NAMES, or "fp64"
    offset: int  # in the payload, bytes
    bytes: int


def lay_out(packets: Iterable[tuple[Vector, Kind, str, int]]) -> tuple[PacketSpec, ...]:
    """The packets (vector, kind, encoding, bytes), one after the other."""
    specs: list[PacketSpec] = []
    offset = 0
    for vector, kind, encoding, size in packets:
        specs.append(PacketSpec(vector, kind, encoding, offset, size))
        offset += size
    return tuple(specs)
