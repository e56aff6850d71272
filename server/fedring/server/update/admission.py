"""Checks of an update before it is accepted.

Its header is checked before any byte of the payload, then every byte. An update that passes cannot stop the
aggregation, write outside of the model, or make a sum over clients infinite.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite, sqrt

import numpy as np
from google.protobuf.message import DecodeError

from fedring.codec import BUFFERS, DELTA_ONLY, NAMES, Decoder, Reader
from fedring.codec.digest import is_blake3, name_of, update_name
from fedring.codec.errors import CodecError
from fedring.codec.schema import Schema
from fedring.rpc.contract import MAX_HEADER_BYTES, SMALL_BYTES
from fedring.rpc.errors import BadRequest, BadUpdate, DamagedOnTheWay, NotAllowed, OtherUpdate, TooLarge
from fedring.server.aggregation.contributions import open_packet, values_at_a_time
from fedring.server.aggregation.terms import OpaqueForm, Terms
from fedring.server.aggregation.walk import cut, tiles
from fedring.server.state.rows import Kind, PacketSpec, UpdateRow, Vector, lay_out
from fedring.train.bounds import MAX_SAMPLES, MAX_SECONDS
from fedring.train.metrics import check_metrics
from fedring.v1 import federation_pb2 as pb

MAX_PACKETS = 16
MAX_METRICS = 32
MAX_BUFFER = 1e200
"""The largest magnitude of a buffer's value: beyond it, a weighted sum could leave float64."""

MAX_NORM = 1e30
"""The largest norm of an update: beyond it, a mean could leave float32, and one client could end every round."""

_VECTORS: dict[int, Vector] = {pb.VECTOR_PARAMETERS: "parameters", pb.VECTOR_BUFFERS: "buffers"}
_KINDS: dict[int, Kind] = {pb.KIND_WEIGHTS: "weights", pb.KIND_DELTA: "delta"}
_HEAD = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


@dataclass(frozen=True, slots=True)
class DecodedOffer:
    """An update that a client offers: its header and names.

    The names are of the update and of its payload.
    """

    header: pb.UpdateHeader
    digest: str  # of the payload
    name: str  # of the header's bytes and the payload's digest
    audit_head: str = ""  # of the client's own log


@dataclass(frozen=True, slots=True)
class Admission:
    """The facts that the checks of an update have found."""

    packets: tuple[PacketSpec, ...]
    norm: float  # L2, of the parameters' delta, or of the weights if these were sent; 0 if it is opaque
    at: float  # wall clock, seconds


def open_offer(offer: pb.UpdateOffer) -> DecodedOffer:
    """Decode an offer.

    Raises:
        DamagedOnTheWay: if the name is not that of the header and the payload's digest.
        BadUpdate: "bad_header", if the header is too long or no header, or the head of the client's log has another
            form; "bad_digest", if the payload's digest is not a name by BLAKE3.
    """
    if len(offer.header) > MAX_HEADER_BYTES:
        text = f"a header of {len(offer.header)} bytes; at most {MAX_HEADER_BYTES} are taken"
        raise BadUpdate(text, reason="bad_header")
    if update_name(offer.header, offer.payload_digest) != offer.name:
        raise DamagedOnTheWay("the header is not what the update's name says: send it again")
    if not is_blake3(offer.payload_digest):
        text = f"payload_digest is {offer.payload_digest[:100]!r}: it must be blake3- and 64 lower-case hex digits"
        raise BadUpdate(text, reason="bad_digest")
    if offer.audit_head and not _HEAD.fullmatch(offer.audit_head):
        raise BadUpdate("audit_head is not empty, and no 64 hexadecimal digits", reason="bad_header")
    try:
        header = pb.UpdateHeader.FromString(offer.header)
    except DecodeError:
        raise BadUpdate("the header is not an UpdateHeader", reason="bad_header") from None
    return DecodedOffer(header, offer.payload_digest, offer.name, offer.audit_head)


def accepted_before(offer: DecodedOffer, name: str) -> bool:
    """Return whether the offered update is the one that was accepted before.

    Args:
        offer: the update.
        name: of the client's accepted update for the same round; empty if there is none.

    Raises:
        OtherUpdate: it is another one.
    """
    if name and name != offer.name:
        text = f"another update of {offer.header.client_id} was accepted for round {offer.header.round}"
        raise OtherUpdate(text)
    return bool(name)


def check_whole(offer: DecodedOffer, payload: bytes, terms: Terms) -> tuple[PacketSpec, ...]:
    """Check an update that came in one message, except for its values.

    Args:
        offer: its header and names.
        payload: all of it.
        terms: the demands of its round.

    Returns:
        The packets.

    Raises:
        BadUpdate, TooLarge, CodecError: if the header does not fit.
        BadRequest: "bad_chunk", if the payload has another length than the header says, or a message cannot carry it.
        DamagedOnTheWay: if the payload is not that of the offer.
    """
    packets = check_offer(offer.header, terms)
    declared = offer.header.total_bytes
    if not len(payload) == declared <= SMALL_BYTES:
        text = f"{len(payload)} bytes, not the declared {declared}, or more than {SMALL_BYTES}"
        raise BadRequest(text, reason="bad_chunk")
    if name_of(payload) != offer.digest:
        raise DamagedOnTheWay("the payload is not what its digest says: send it again")
    return packets


def check_sender(header: pb.UpdateHeader, client_id: str) -> None:
    """Check that an update is of the client that makes the call.

    Raises:
        NotAllowed: It is of another one.
    """
    if header.client_id != client_id:
        raise NotAllowed(f"{client_id} cannot speak for another client", reason="wrong_client")


def check_offer(header: pb.UpdateHeader, terms: Terms) -> tuple[PacketSpec, ...]:
    """Check that a header fits the terms of its round, and itself.

    Args:
        header: What the client says of its update.
        terms: The demands of the round.

    Returns:
        The packets.

    Raises:
        BadUpdate, TooLarge, CodecError: What does not fit.
    """
    if header.base_digest != terms.base_digest:
        text = f"round {header.round} starts from another model than {header.base_digest[:80]!r}"
        raise BadUpdate(text, reason="wrong_model")
    if header.total_bytes > terms.most_bytes:
        raise TooLarge(f"{header.total_bytes} bytes; the limit is {terms.most_bytes}")
    packets = check_header(header, terms.schema, terms.opaque)
    if terms.deltas_only and any(each.kind == "weights" for each in packets if each.vector == "parameters"):
        keys = "update_clip, update_clip_factor, dp or asynchronous"
        text = f"parameters as weights: a job with {keys} takes differences only"
        raise BadUpdate(text, reason="bad_packets")
    control = header.control
    if control.line != terms.control_line:
        raise BadUpdate(_wrong_control(control.line, terms.control_line), reason="wrong_control")
    if control.previous and not is_blake3(control.previous):
        raise BadUpdate(
            f"control.previous is {control.previous[:100]!r}, which names no update", reason="wrong_control"
        )
    if terms.silent and (
        header.metrics or header.train_seconds or any(packet.num_samples != 1 for packet in header.packets)
    ):
        text = "the job has sample_dp, and this update tells figures of its training: update this client"
        raise BadUpdate(text, reason="no_sample_dp")
    return packets


def row_of(offer: DecodedOffer, terms: Terms, found: Admission, payload: bytes, *, epoch: int) -> UpdateRow:
    """Return the row of an update that passed all checks.

    Args:
        offer: The update's header and names.
        terms: The demands of its round.
        found: The facts that the checks have found.
        payload: The bytes that the row keeps; empty if a blob keeps them.
        epoch: Of the server.
    """
    header, bare = offer.header, terms.bare
    return UpdateRow(
        round=header.round,
        client_id=header.client_id,
        digest=offer.digest,
        name=offer.name,
        packets=found.packets,
        num_samples=1 if bare else header.packets[-1].num_samples,
        total_bytes=header.total_bytes,
        train_seconds=0.0 if bare else header.train_seconds,
        norm=found.norm,
        accepted_at=found.at,
        metrics={} if bare else dict(header.metrics),
        blob="" if payload else offer.digest,
        payload=payload,
        epoch=epoch,
        control_previous=header.control.previous,
    )


def check_header(header: pb.UpdateHeader, schema: Schema, opaque: OpaqueForm | None = None) -> tuple[PacketSpec, ...]:
    """Check that the header fits the model and itself.

    Args:
        header: What the client says of its update.
        schema: The schema of the model that the round starts from.
        opaque: The form of an update that the server cannot open; None if it reads each.

    Returns:
        The packets.

    Raises:
        CodecError: What does not fit.
    """
    if header.epoch >= 2**63:
        raise CodecError("bad_epoch", f"{header.epoch} is not below 2^63")
    if header.schema_hash != schema.hash:
        raise CodecError("wrong_schema", f"expected {schema.hash.hex()[:16]}, got {header.schema_hash.hex()[:16]}")
    specs = packets_of(header) if opaque is None else opaque.packets(header)
    if _bytes_of(specs, schema.num_parameters, schema.num_buffers) != header.total_bytes:
        raise CodecError("bad_packets", f"the packets are not {header.total_bytes} bytes together")
    check_figures(header.train_seconds, header.metrics)
    return specs


def packets_of(header: pb.UpdateHeader) -> tuple[PacketSpec, ...]:
    """Return the header's packets with their places in the payload.

    Raises:
        CodecError: If no model has such packets.
    """
    if not 1 <= len(header.packets) <= MAX_PACKETS:
        raise CodecError("bad_packets", f"{len(header.packets)} packets are not 1..{MAX_PACKETS}")
    return _laid_out(tuple(_packet(packet) for packet in header.packets))


def check_figures(train_seconds: float, metrics: Mapping[str, float]) -> None:
    """Check a client's figures of its training.

    They are in an update's header, or come from the worker of a group.

    Args:
        train_seconds: Seconds in the training loop.
        metrics: Figures of the training, by name.

    Raises:
        CodecError: "bad_metrics", if a figure is out of range or badly named, or if there are too many.
    """
    if not 0 <= train_seconds <= MAX_SECONDS:
        raise CodecError(
            "bad_metrics", f"train_seconds = {train_seconds:g} is not within 0 and {MAX_SECONDS} (30 days)"
        )
    try:
        check_metrics(metrics)
    except ValueError as error:
        raise CodecError("bad_metrics", str(error)) from None


def check_payload(
    reader: Reader,
    packets: Sequence[PacketSpec],
    schema: Schema,
    exact: bool = False,
    opaque: OpaqueForm | None = None,
) -> float:
    """Check every byte of a payload.

    Its values must be finite and within their bounds. Of an opaque update only the form is checked: whatever the values
    are, they look random.

    Args:
        reader: Returns so many bytes of the payload at an offset.
        packets: Where each encoded vector lies in the payload.
        schema: The schema of the model that the update is of.
        exact: Add the norm up in float64, which takes longer. Otherwise, it may be wrong by a few parts in 10,000.
        opaque: The form of an update that the server cannot open; None if it reads each.

    Returns:
        The L2 norm of the parameters' delta, or of the parameters themselves if weights were sent. 0 if it is opaque.

    Raises:
        CodecError: What is wrong; "out_of_range" if a value or the norm is.
    """
    if opaque is not None:
        opaque.check(reader, packets[0].bytes)
        return 0.0
    for decoder in _open(reader, packets, "buffers", schema.num_buffers):
        for start, stop in tiles(schema.num_buffers):
            if np.abs(decoder.decode(start, stop)).max() > MAX_BUFFER:
                raise CodecError("out_of_range", f"a buffer beyond {MAX_BUFFER}")
    decoders = _open(reader, packets, "parameters", schema.num_parameters)
    spans = cut(0, schema.num_parameters, values_at_a_time(decoders))
    norm = sqrt(sum(_square(decoders, start, stop, exact) for start, stop in spans))
    if norm > MAX_NORM:
        raise CodecError("out_of_range", f"a norm of {norm:.3g}, beyond {MAX_NORM:g}")
    return norm


def _square(decoders: Sequence[Decoder], start: int, stop: int, exact: bool) -> float:
    """Return the sum of the squared parameters in the range."""
    if len(decoders) == 1 and not exact:
        square = decoders[0].square(start, stop)
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


_laid_out = lru_cache(lay_out)  # most clients of a round lay their payloads out in the same way


@lru_cache
def _bytes_of(specs: tuple[PacketSpec, ...], num_parameters: int, num_buffers: int) -> int:
    """Return the bytes of all packets, after a check of each vector."""
    for vector, length in (("parameters", num_parameters), ("buffers", num_buffers)):
        _check_vector([spec for spec in specs if spec.vector == vector], vector, length)
    return sum(spec.bytes for spec in specs)


def _check_vector(specs: Sequence[PacketSpec], vector: str, length: int) -> None:
    if len({spec.kind for spec in specs}) > 1:
        raise CodecError("mixed_kinds", f"weights and deltas of the {vector}")
    if specs and not length:
        raise CodecError("wrong_schema", f"the model has no {vector}")
    if length and not specs and vector == "parameters":
        raise CodecError("bad_packets", "no parameters")


def _open(reader: Reader, packets: Sequence[PacketSpec], vector: Vector, length: int) -> list[Decoder]:
    return [open_packet(reader, packet, length) for packet in packets if packet.vector == vector]


def _wrong_control(line: str, wanted: str) -> str:
    if not line:
        return "the update was trained without the correction of scaffold = true: update this client"
    if not wanted:
        return "the update was trained with a correction that the job does not ask for"
    return f"the update was trained with the control variate of the line {line[:80]!r}, and not of {wanted!r}"
