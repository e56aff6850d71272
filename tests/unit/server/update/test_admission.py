"""Admission of an update: its offer must match its name; its header is checked before its payload is received."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from grpc import StatusCode
from numpy.typing import NDArray

from fedring.codec import NAMES, TILE, Encoding, Entry, Reader, Schema, encode, encode_buffers
from fedring.codec.digest import name_of, update_name
from fedring.codec.errors import CodecError
from fedring.rpc.contract import MAX_HEADER_BYTES
from fedring.rpc.errors import BadUpdate, DamagedOnTheWay
from fedring.secure.masks import Width, masked_packet
from fedring.server.model.transforms.masked import MaskedForm
from fedring.server.state.rows import PacketSpec, lay_out
from fedring.server.update.admission import check_header, check_payload, open_offer, packets_of
from fedring.train.bounds import MAX_SAMPLES
from fedring.v1 import federation_pb2 as pb

SCHEMA = Schema((Entry("w", (300,), "float32", "parameter"), Entry("m", (3,), "float32", "buffer")))
VALUES = np.linspace(-1, 1, 300, dtype=np.float32)


def packet(**changes: Any) -> pb.Packet:
    made = pb.Packet(vector=pb.VECTOR_PARAMETERS, kind=pb.KIND_DELTA, encoding="fp32", bytes=90, num_samples=5)
    made.MergeFrom(pb.Packet(**changes))
    return made


def header(*packets: pb.Packet) -> pb.UpdateHeader:
    packets = packets or (packet(),)
    total = sum(each.bytes for each in packets)
    return pb.UpdateHeader(schema_hash=SCHEMA.hash, packets=packets, total_bytes=total)


def offer(sent: bytes, digest: str = name_of(b"a payload")) -> pb.UpdateOffer:
    """Return an offer that matches its name."""
    return pb.UpdateOffer(header=sent, payload_digest=digest, name=update_name(sent, digest))


def test_an_opened_offer_has_the_header_and_the_names_that_were_sent() -> None:
    made = offer(header().SerializeToString())
    offered = open_offer(made)
    assert (offered.header, offered.digest, offered.name) == (header(), made.payload_digest, made.name)


def test_a_header_may_be_serialised_as_another_language_does_it() -> None:
    sent = header().SerializeToString()
    other = sent[34:] + b"\xf8\x07\x01" + sent[:34]  # the schema's hash comes last, after a field of a later version
    opened = open_offer(offer(other))
    assert other != sent
    assert opened.name == update_name(other, opened.digest)
    check_header(opened.header, SCHEMA)


@pytest.mark.parametrize(
    "damage",
    [
        lambda made: setattr(made, "name", name_of(b"another")),
        lambda made: setattr(made, "name", ""),
        lambda made: setattr(made, "name", made.name.removeprefix("blake3-")),
        lambda made: setattr(made, "name", made.name.upper()),
        lambda made: setattr(made, "header", made.header + b"\x80\x01\x01"),
        lambda made: setattr(made, "header", b""),
        lambda made: setattr(made, "payload_digest", name_of(b"another")),
        lambda made: setattr(made, "payload_digest", ""),
        lambda made: made.Clear(),
    ],
    ids=[
        "name",
        "no name",
        "name without prefix",
        "name in capitals",
        "longer header",
        "no header",
        "digest",
        "no digest",
        "nothing",
    ],
)
def test_an_offer_that_does_not_match_its_name_is_refused_as_damaged(
    damage: Callable[[pb.UpdateOffer], object],
) -> None:
    made = offer(header().SerializeToString())
    damage(made)
    with pytest.raises(DamagedOnTheWay, match="send it again") as caught:
        open_offer(made)
    assert (caught.value.status, caught.value.reason) == (StatusCode.DATA_LOSS, "digest_mismatch")


def test_a_header_may_be_max_header_bytes_long_and_no_longer() -> None:
    bare = len(pb.UpdateHeader(client_id="x" * MAX_HEADER_BYTES).SerializeToString()) - MAX_HEADER_BYTES
    longest = pb.UpdateHeader(client_id="x" * (MAX_HEADER_BYTES - bare)).SerializeToString()
    assert len(longest) == MAX_HEADER_BYTES
    assert len(open_offer(offer(longest)).header.client_id) == MAX_HEADER_BYTES - bare
    with pytest.raises(BadUpdate, match=f"a header of {MAX_HEADER_BYTES + 2} bytes") as caught:
        open_offer(offer(longest + b"\x10\x01"))
    assert caught.value.reason == "bad_header"


def test_a_header_that_is_too_long_is_refused_before_its_name_is_checked() -> None:
    with pytest.raises(BadUpdate, match="at most") as caught:
        open_offer(pb.UpdateOffer(header=bytes(MAX_HEADER_BYTES + 1)))
    assert caught.value.reason == "bad_header"


@pytest.mark.parametrize("sent", [b"\x0a", b"\xff" * 20, b"not a header", b"\x0a\x02\xff\xfe"])
def test_bytes_that_are_not_a_header_are_refused_as_invalid(sent: bytes) -> None:
    with pytest.raises(BadUpdate, match="is not an UpdateHeader") as caught:
        open_offer(offer(sent))
    assert (caught.value.status, caught.value.reason) == (StatusCode.INVALID_ARGUMENT, "bad_header")


def test_a_valid_header_passes_and_gives_the_offsets_of_its_packets() -> None:
    buffers = packet(vector=pb.VECTOR_BUFFERS, kind=pb.KIND_WEIGHTS, encoding="fp64", bytes=40)
    made = header(packet(), packet(encoding="sq8", bytes=10), buffers)
    made.metrics["loss"] = 0.5
    check_header(made, SCHEMA)
    assert packets_of(made) == (
        PacketSpec("parameters", "delta", "fp32", 0, 90),
        PacketSpec("parameters", "delta", "sq8", 90, 10),
        PacketSpec("buffers", "weights", "fp64", 100, 40),
    )


BAD: dict[str, tuple[str, Callable[[pb.UpdateHeader], object]]] = {
    "another schema": ("wrong_schema", lambda h: h.ClearField("schema_hash")),
    "no packets": ("bad_packets", lambda h: h.ClearField("packets")),
    "17 packets": ("bad_packets", lambda h: h.packets.extend([packet()] * 16)),
    "a packet without a vector": ("bad_packets", lambda h: h.packets.append(pb.Packet(bytes=1, num_samples=1))),
    "an empty packet": ("bad_packets", lambda h: setattr(h.packets[0], "bytes", 0)),
    "another total": ("bad_packets", lambda h: setattr(h, "total_bytes", 91)),
    "only buffers": (
        "bad_packets",
        lambda h: h.packets[0].MergeFrom(pb.Packet(vector=pb.VECTOR_BUFFERS, encoding="fp64")),
    ),
    "weights and deltas": ("mixed_kinds", lambda h: h.packets.append(packet(kind=pb.KIND_WEIGHTS))),
    "sparse weights": (
        "mixed_kinds",
        lambda h: h.packets[0].MergeFrom(packet(kind=pb.KIND_WEIGHTS, encoding="packed")),
    ),
    "an unknown encoding": ("unknown_encoding", lambda h: setattr(h.packets[0], "encoding", "pickle")),
    "parameters as fp64": ("unknown_encoding", lambda h: setattr(h.packets[0], "encoding", "fp64")),
    "buffers as fp32": ("unknown_encoding", lambda h: h.packets.append(packet(vector=pb.VECTOR_BUFFERS))),
    "no samples": ("bad_samples", lambda h: setattr(h.packets[0], "num_samples", 0)),
    "too many samples": ("bad_samples", lambda h: setattr(h.packets[0], "num_samples", MAX_SAMPLES + 1)),
    "an epoch that no database holds": ("bad_epoch", lambda h: setattr(h, "epoch", 2**63)),
    "a duration that is not a number": ("bad_metrics", lambda h: setattr(h, "train_seconds", float("nan"))),
    "a negative duration": ("bad_metrics", lambda h: setattr(h, "train_seconds", -1.0)),
    "a duration of 1e308 s": ("bad_metrics", lambda h: setattr(h, "train_seconds", 1e308)),
    "a duration of more than 30 days": ("bad_metrics", lambda h: setattr(h, "train_seconds", 30 * 86400 + 1.0)),
    "a metric whose sum could overflow": ("bad_metrics", lambda h: h.metrics.update({"loss": -1e308})),
    "a metric that is not a number": ("bad_metrics", lambda h: h.metrics.update({"loss": float("nan")})),
    "an infinite metric": ("bad_metrics", lambda h: h.metrics.update({"loss": float("inf")})),
    "a metric with a space in its name": ("bad_metrics", lambda h: h.metrics.update({"a b": 1.0})),
    "33 metrics": ("bad_metrics", lambda h: h.metrics.update({f"m{i}": 1.0 for i in range(33)})),
}


@pytest.mark.parametrize("case", BAD)
def test_an_invalid_header_is_refused_before_the_payload(case: str) -> None:
    reason, damage = BAD[case]
    made = header()
    damage(made)
    with pytest.raises(CodecError) as caught:
        check_header(made, SCHEMA)
    assert caught.value.reason == reason


def test_buffers_for_a_model_without_any_are_refused() -> None:
    bare = Schema(SCHEMA.entries[:1])
    made = header(packet(), packet(vector=pb.VECTOR_BUFFERS, encoding="fp64"))
    made.schema_hash = bare.hash
    with pytest.raises(CodecError, match="wrong_schema"):
        check_header(made, bare)


def payload(
    *parts: tuple[str, NDArray[np.float32]], buffers: NDArray[np.float64] | None = None
) -> tuple[Reader, tuple[PacketSpec, ...]]:
    blobs = [encode(values, Encoding(name, chunk=64)) for name, values in parts]
    packets = lay_out([("parameters", "delta", name, len(blob)) for (name, _), blob in zip(parts, blobs, strict=True)])
    if buffers is not None:
        size = sum(map(len, blobs))
        blobs.append(encode_buffers(buffers))
        packets += (PacketSpec("buffers", "weights", "fp64", size, len(blobs[-1])),)
    return reader_of(b"".join(blobs)), packets


def reader_of(data: bytes) -> Reader:
    return lambda offset, size: data[offset : offset + size]


@pytest.mark.parametrize("name", NAMES)
def test_the_norm_is_computed_from_the_parameters_alone(name: str) -> None:
    norm = check_payload(*payload((name, VALUES), buffers=np.full(3, 1e6)), SCHEMA)
    kept = VALUES if name not in ("fp32_sparse", "sq8", "packed") else np.sort(np.abs(VALUES))[-30:]
    assert norm == pytest.approx(float(np.linalg.norm(kept)), rel=0.15 if name == "uniform" else 0.01)


def test_the_norm_is_computed_from_the_sum_of_the_packets() -> None:
    norm = check_payload(*payload(("fp32", VALUES), ("fp32", -VALUES)), SCHEMA)
    assert norm == 0.0


def test_the_norm_covers_every_tile() -> None:
    schema = Schema((Entry("w", (2 * TILE + 5,), "float32", "parameter"),))
    values = np.ones(2 * TILE + 5, np.float32)
    assert check_payload(*payload(("fp32", values)), schema) == pytest.approx(len(values) ** 0.5)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 299])
def test_a_value_that_is_not_finite_is_refused_at_every_place(value: float, place: int) -> None:
    data = bytearray(encode(VALUES, Encoding("fp32")))
    end = len(data) - 4 * (299 - place)
    data[end - 4 : end] = np.float32(value).tobytes()
    packets = lay_out([("parameters", "delta", "fp32", len(data))])
    with pytest.raises(CodecError) as caught:
        check_payload(reader_of(bytes(data)), packets, SCHEMA)
    assert caught.value.reason == "non_finite"


def test_a_buffer_that_could_overflow_a_sum_is_refused() -> None:
    with pytest.raises(CodecError) as caught:
        check_payload(*payload(("fp32", VALUES), buffers=np.array([0, 0, -1e300])), SCHEMA)
    assert caught.value.reason == "out_of_range"


def test_a_packet_with_too_few_values_is_refused() -> None:
    with pytest.raises(CodecError):
        check_payload(*payload(("fp32", VALUES[:-1])), SCHEMA)


@pytest.mark.parametrize("name", NAMES)
def test_a_truncated_payload_is_refused(name: str) -> None:
    read, packets = payload((name, VALUES))
    data = read(0, packets[0].bytes)
    for size in range(1, len(data), 7):
        short = lay_out([("parameters", "delta", name, size)])
        with pytest.raises(CodecError):
            check_payload(reader_of(bytes(data[:size])), short, SCHEMA)


WIDTH = Width(300, 7)


def masked(**changes: Any) -> pb.UpdateHeader:
    return header(packet(**{"encoding": "masked", "bytes": WIDTH.bytes, **changes}))


def test_a_masked_update_is_taken_where_one_must_be_and_has_no_norm() -> None:
    packets = check_header(masked(), SCHEMA, MaskedForm(WIDTH))
    assert packets == (PacketSpec("parameters", "delta", "masked", 0, WIDTH.bytes),)
    data = b"".join(masked_packet(np.full(300, 127, np.uint8), 7))
    assert check_payload(reader_of(data), packets, SCHEMA, True, MaskedForm(WIDTH)) == 0.0


@pytest.mark.parametrize(
    ("made", "width", "reason"),
    [
        (masked(), None, "unknown_encoding"),
        (header(), WIDTH, "not_masked"),
        (masked(kind=pb.KIND_WEIGHTS), WIDTH, "not_masked"),
        (masked(vector=pb.VECTOR_BUFFERS), WIDTH, "not_masked"),
        (header(packet(encoding="masked", bytes=WIDTH.bytes), packet(vector=pb.VECTOR_BUFFERS)), WIDTH, "not_masked"),
        (masked(bytes=WIDTH.bytes + 1), WIDTH, "wrong_width"),
        (masked(bytes=90), WIDTH, "wrong_width"),
    ],
    ids=["no-secure-round", "plain", "weights", "buffers", "two-packets", "longer", "shorter"],
)
def test_masked_and_other_packets_are_taken_in_their_own_rounds_only(
    made: pb.UpdateHeader, width: Width | None, reason: str
) -> None:
    with pytest.raises(CodecError) as caught:
        check_header(made, SCHEMA, MaskedForm(width) if width else None)
    assert caught.value.reason == reason


@pytest.mark.parametrize(("count", "bits"), [(301, 7), (300, 6), (600, 7)], ids=["count", "bits", "both"])
def test_a_masked_payload_of_another_width_than_its_header_says_is_refused(count: int, bits: int) -> None:
    data = b"".join(masked_packet(np.zeros(count, np.uint8), bits))[: WIDTH.bytes].ljust(WIDTH.bytes, b"\0")
    packets = check_header(masked(), SCHEMA, MaskedForm(WIDTH))
    with pytest.raises(CodecError) as caught:
        check_payload(reader_of(data), packets, SCHEMA, True, MaskedForm(WIDTH))
    assert caught.value.reason == "wrong_width"
