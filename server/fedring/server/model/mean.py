"""Federated averaging (McMahan et al. 2017, algorithm 1) of one range of a model.

The law: a range of the result depends on the same range of the base and of the
clients' updates only, and clients are added in client-id order in float64. So the
same updates give the same bytes, however they came and however the walk is cut.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedring.codec import TILE, Decoder, Reader, open_payload
from fedring.codec.dense import DenseDecoder
from fedring.codec.errors import CodecError
from fedring.codec.int8 import Int8Decoder
from fedring.codec.schema import Schema
from fedring.server.state.rows import Kind, PacketSpec, Vector

_BLOCK = 1 << 17

INTEGERS = ("int", "uint", "bool")
"""How the dtypes begin whose buffers are rounded to whole numbers."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """One client's accepted update."""

    client_id: str
    num_samples: int
    packets: tuple[PacketSpec, ...]
    reader: Reader  # of the payload


@dataclass(frozen=True, slots=True)
class Source:
    """One client's packets of one vector, which add up."""

    num_samples: int
    kind: Kind
    decoders: tuple[Decoder, ...]


def open_sources(contributions: Sequence[Contribution], vector: Vector, length: int) -> list[Source]:
    """Those contributions that carry the vector, in client-id order."""
    if len({contribution.client_id for contribution in contributions}) != len(contributions):
        raise ValueError("a client contributes twice")
    sources = []
    for contribution in sorted(contributions, key=lambda each: each.client_id):
        packets = [packet for packet in contribution.packets if packet.vector == vector]
        if packets:
            decoders = tuple(open_packet(contribution.reader, packet, length) for packet in packets)
            sources.append(Source(contribution.num_samples, packets[0].kind, decoders))
    return sources


def open_packet(reader: Reader, packet: PacketSpec, length: int) -> Decoder:
    """A decoder of the packet, for a vector of `length`."""

    def read(offset: int, size: int) -> bytes | memoryview:
        return reader(packet.offset + offset, size)

    return open_payload(read, packet.bytes, name=packet.encoding, length=length)


def step_of(decoders: Iterable[Decoder]) -> int:
    """Values to take at a time, at most TILE: few where that is cheap, so that they stay in the processor's cache."""
    plain = all(isinstance(decoder, DenseDecoder | Int8Decoder) for decoder in decoders)
    return _BLOCK if plain else TILE  # the others decode a whole segment, however little of it is wanted


def mean_delta(
    base: NDArray[np.float32] | NDArray[np.float64], sources: Sequence[Source], start: int, stop: int
) -> NDArray[np.float64]:
    """sum_i n_i d_i / sum_i n_i in the range, [stop - start]; d_i is the client's sum of packets.

    For weights instead of a delta d_i is the weights minus `base`, [stop - start].
    """
    total = np.zeros(stop - start, np.float64)
    for source in sources:
        for decoder in source.decoders:
            decoder.add(start, stop, total, float(source.num_samples))
    if absolute := sum(source.num_samples for source in sources if source.kind == "weights"):
        total -= np.multiply(base, float(absolute), dtype=np.float64)
    total /= float(sum(source.num_samples for source in sources))
    return total


def moved_parameters(base: NDArray[np.float32], delta: NDArray[np.float64]) -> NDArray[np.float32]:
    """base + delta, rounded once, [n]; CodecError("non_finite") if a value leaves float32. Overwrites `delta`."""
    delta += base
    with np.errstate(over="ignore"):
        moved = delta.astype(np.float32)
    if not np.isfinite(moved).all():
        raise CodecError("non_finite", "the mean leaves float32")
    return moved


def moved_buffers(
    base: NDArray[np.float64], delta: NDArray[np.float64], whole: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """base + delta, [n], to the nearest whole number where `whole`, [n]."""
    moved = base + delta
    np.rint(moved, out=moved, where=whole)
    if not np.isfinite(moved).all():
        raise CodecError("non_finite", "a buffer's mean leaves float64")
    return moved


def whole_numbers(schema: Schema, start: int, stop: int) -> NDArray[np.bool_]:
    """Which of the buffers start to stop belong to integer tensors, [stop - start]."""
    whole = np.zeros(stop - start, np.bool_)
    for entry, span in schema.spans("buffer"):
        if entry.dtype.startswith(INTEGERS):
            whole[max(span.start - start, 0) : max(span.stop - start, 0)] = True
    return whole
