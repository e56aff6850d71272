"""The updates of one round, read range by range.

The aggregation reads each client's values of one vector. Nothing is decoded before it is needed, so that a model of any
size is aggregated in the memory of a few tiles.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from fedring.codec import TILE, Decoder, Reader, open_payload
from fedring.codec.source import read_only
from fedring.server.state.rows import Kind, PacketSpec, Vector

_BLOCK = 1 << 17

Values = NDArray[np.float32] | NDArray[np.float64]
"""A range of the parameters (float32) or of the buffers (float64)."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """One client's accepted update."""

    client_id: str
    weight: float  # what it counts in a mean, above 0; often its number of samples
    packets: tuple[PacketSpec, ...]
    reader: Reader  # of the payload; called from several threads
    factor: float = 1.0  # by which the parameters' delta is multiplied; below 1 if it is too long
    values: Decoder | None = None  # the parameters' delta, if no packet has it, such as that of a sum of updates


class HeldValues(Decoder):
    """Values that lie in memory since they were checked.

    Args:
        values: all of them, [length] float32, finite.
    """

    seeks: ClassVar[bool] = True

    def __init__(self, values: NDArray[np.float32]) -> None:
        self._values = read_only(values.view())

    def decode(self, start: int, stop: int) -> NDArray[np.floating]:
        """See Decoder.decode, always a read-only view."""
        return self._values[start:stop]


@dataclass(frozen=True, slots=True)
class ClientVector:
    """One client's values of one vector.

    They are the sum of its packets, which are decoded range by range.
    """

    client_id: str
    weight: float  # what it counts in a mean, above 0
    kind: Kind  # "delta", or "weights", from which the base must be subtracted
    decoders: tuple[Decoder, ...]
    factor: float = 1.0  # by which its delta is multiplied

    def add_to(self, total: NDArray[np.float64], start: int, stop: int, weight: float) -> None:
        """Add a range of values, times `weight`, to `total`, [stop - start].

        The range is from `start` to `stop`, and the values are as they were sent.
        """
        for decoder in self.decoders:
            decoder.add(start, stop, total, weight)

    def delta(self, base: Values, start: int, stop: int) -> NDArray[np.float64]:
        """Return the client's difference to `base`, scaled, [stop - start].

        `base` holds the same range. The difference is multiplied by the client's factor.
        """
        values = np.zeros(stop - start, np.float64)
        self.add_to(values, start, stop, 1.0)
        if self.kind == "weights":
            values -= base
        values *= self.factor
        return values


def open_vectors(contributions: Sequence[Contribution], vector: Vector, length: int) -> list[ClientVector]:
    """Open one vector of all updates that carry it.

    Args:
        contributions: the updates, in any order.
        vector: the vector that is read.
        length: the number of its values in the model.

    Returns:
        The clients' vectors in client-id order.

    Raises:
        ValueError: if a client contributes twice.
        CodecError: if the header of a packet is damaged.
    """
    if len({contribution.client_id for contribution in contributions}) != len(contributions):
        raise ValueError("a client contributes twice")
    vectors = []
    for contribution in sorted(contributions, key=lambda each: each.client_id):
        packets = [packet for packet in contribution.packets if packet.vector == vector]
        if vector == "parameters" and contribution.values is not None:
            client, only = contribution.client_id, (contribution.values,)
            vectors.append(ClientVector(client, contribution.weight, "delta", only, contribution.factor))
        elif packets:
            decoders = tuple(open_packet(contribution.reader, packet, length) for packet in packets)
            factor = contribution.factor if vector == "parameters" else 1.0
            kind, client = packets[0].kind, contribution.client_id
            vectors.append(ClientVector(client, contribution.weight, kind, decoders, factor))
    return vectors


def reader_of(payload: bytes) -> Reader:
    """Return a reader of a payload, which copies nothing."""
    whole = memoryview(payload)
    return lambda offset, size: whole[offset : offset + size]


def open_packet(reader: Reader, packet: PacketSpec, length: int) -> Decoder:
    """Return a decoder of one packet.

    Args:
        reader: reads the payload that the packet is a part of.
        packet: where the packet lies, and how it is encoded.
        length: the number of values in the vector.
    """

    def read(offset: int, size: int) -> bytes | memoryview:
        return reader(packet.offset + offset, size)

    return open_payload(read, packet.bytes, name=packet.encoding, length=length)


def values_at_a_time(decoders: Iterable[Decoder]) -> int:
    """Return the number of values for a walk's step.

    It is at most TILE. Encodings that can be read at any place are read in blocks that stay in the processor's cache.
    The others decode a whole segment, however little of it is wanted.
    """
    return _BLOCK if all(decoder.seeks for decoder in decoders) else TILE
