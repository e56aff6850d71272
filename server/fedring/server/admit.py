"""What is checked before an update counts: its header before any byte of payload, then every byte.

Nothing that passes can stop the aggregation or write outside of the model.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, sqrt

import numpy as np

from fedring.codec import BUFFERS, DELTA_ONLY, NAMES, Decoder, Reader
from fedring.codec.errors import CodecError
from fedring.codec.schema import Schema
from fedring.server.mean import open_packet, step_of
from fedring.server.packets import Kind, PacketSpec, Vector, lay_out
from fedring.server.walk import cut, tiles
from fedring.v1 import federation_pb2 as pb

MAX_PACKETS = 16
MAX_SAMPLES = 1 << 40
MAX_METRICS = 32
MAX_BUFFER = 1e200
"""Beyond this a weighted sum could leave float64."""

MAX_NORM = 1e30
"""Beyond this a mean could leave float32, and one client could abandon every round."""

_VECTORS: dict[int, Vector] = {pb.VECTOR_PARAMETERS: "parameters", pb.VECTOR_BUFFERS: "buffers"}
_KINDS: dict[int, Kind] = {pb.KIND_WEIGHTS: "weights", pb.KIND_DELTA: "delta"}
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


@dataclass(frozen=True, slots=True)
class Admitted:
    """A payload of which every byte was read and found good."""

    norm: float  # L2, of the parameters' delta, or of the weights where they were sent


def check_header(header: pb.UpdateHeader, schema: Schema) -> None:
    """The header fits the model and itself; CodecError says what does not."""
    if header.schema_hash != schema.hash:
        raise CodecError("wrong_schema", f"expected {schema.hash.hex()[:16]}, got {header.schema_hash.hex()[:16]}")
    if len(header.digest) != 32:
        raise CodecError("bad_digest", f"{len(header.digest)} bytes instead of 32")
    specs = packets_of(header)
    for vector, length in (("parameters", schema.num_parameters), ("buffers", schema.num_buffers)):
        _check_vector([spec for spec in specs if spec.vector == vector], vector, length)
    if sum(spec.bytes for spec in specs) != header.total_bytes:
        raise CodecError("bad_packets", f"the packets are not {header.total_bytes} bytes together")
    _check_facts(header)


def packets_of(header: pb.UpdateHeader) -> tuple[PacketSpec, ...]:
    """The header's packets with their places in the payload; CodecError if they cannot be of any model."""
    if not 1 <= len(header.packets) <= MAX_PACKETS:
        raise CodecError("bad_packets", f"{len(header.packets)} packets are not 1..{MAX_PACKETS}")
    return lay_out([_packet(packet) for packet in header.packets])


def check_payload(reader: Reader, packets: Sequence[PacketSpec], schema: Schema) -> Admitted:
    """Every byte of the payload was read, and all values are finite; CodecError says what is wrong."""
    for decoder in _open(reader, packets, "buffers", schema.num_buffers):
        for start, stop in tiles(schema.num_buffers):
            if np.abs(decoder.decode(start, stop)).max() > MAX_BUFFER:
                raise CodecError("out_of_range", f"a buffer beyond {MAX_BUFFER}")
    decoders = _open(reader, packets, "parameters", schema.num_parameters)
    spans = cut(0, schema.num_parameters, step_of(decoders))
    norm = sqrt(sum(_square(decoders, start, stop) for start, stop in spans))
    if norm > MAX_NORM:
        raise CodecError("out_of_range", f"a norm of {norm:.3g}, beyond {MAX_NORM:g}")
    return Admitted(norm)


def _square(decoders: Sequence[Decoder], start: int, stop: int) -> float:
    """The sum of the squared parameters in the range."""
    if len(decoders) == 1:
        values = decoders[0].decode(start, stop)
        with np.errstate(over="ignore"):
            square = float(np.dot(values, values))
        if isfinite(square):
            return square
    total = np.zeros(stop - start, np.float64)
    for decoder in decoders:
        decoder.add(start, stop, total, 1.0)
    return float(np.dot(total, total))


def _packet(packet: pb.Packet) -> tuple[Vector, Kind, str, int]:
    vector, kind = _VECTORS.get(packet.vector), _KINDS.get(packet.kind)
    if vector is None or kind is None or not packet.bytes:
        raise CodecError("bad_packets", "a packet without vector, kind or bytes")
    if packet.encoding not in (NAMES if vector == "parameters" else (BUFFERS,)):
        raise CodecError("unknown_encoding", f"{packet.encoding[:100]!r} for {vector}")
    if kind == "weights" and packet.encoding in DELTA_ONLY:
        raise CodecError("mixed_kinds", f"{packet.encoding} carries a delta only")
    if not 1 <= packet.num_samples <= MAX_SAMPLES:
        raise CodecError("bad_samples", f"{packet.num_samples} samples are not 1..2^40")
    return vector, kind, packet.encoding, packet.bytes


def _check_vector(specs: Sequence[PacketSpec], vector: str, length: int) -> None:
    if len({spec.kind for spec in specs}) > 1:
        raise CodecError("mixed_kinds", f"weights and deltas of the {vector}")
    if specs and not length:
        raise CodecError("wrong_schema", f"the model has no {vector}")
    if length and not specs and vector == "parameters":
        raise CodecError("bad_packets", "no parameters")


def _check_facts(header: pb.UpdateHeader) -> None:
    if not (isfinite(header.train_seconds) and header.train_seconds >= 0):
        raise CodecError("bad_metrics", "train_seconds is not a duration")
    if len(header.metrics) > MAX_METRICS:
        raise CodecError("bad_metrics", f"more than {MAX_METRICS}")
    for name, value in header.metrics.items():
        if not (_NAME.fullmatch(name) and isfinite(value)):
            raise CodecError("bad_metrics", f"{name[:128]!r} = {value}")


def _open(reader: Reader, packets: Sequence[PacketSpec], vector: Vector, length: int) -> list[Decoder]:
    return [open_packet(reader, packet, length) for packet in packets if packet.vector == vector]
