"""Offers of updates, byte by byte: their names, damage to them, and hostile ones."""

import hashlib
import os
import queue
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc import StatusCode

from fedring.codec.digest import name_of, update_name
from fedring.rpc.contract import MAX_HEADER_BYTES
from fedring.rpc.varint import read_varint, varint
from fedring.v1 import federation_pb2 as pb
from tests.conftest import REPEATED, SEED
from tests.damage import ask
from tests.fleets import Control, Fleet
from tests.proxy import flip_bits
from tests.system.wire import (
    SECONDS,
    SIZE,
    Refused,
    WireClient,
    offer_of,
    parameters,
    payload_of,
    published_version,
    run,
)

FLIPS = 60  # in each part of an update
PAYLOAD = payload_of(np.arange(1, SIZE + 1, dtype=np.float32))
WAYS = ("PushUpdate", "PushSmallUpdates")

MISMATCH = (StatusCode.DATA_LOSS, "digest_mismatch")
ON_THE_WAY = {MISMATCH, (StatusCode.INVALID_ARGUMENT, "bad_request"), (StatusCode.INVALID_ARGUMENT, "bad_chunk")}
"""How a damaged update is refused, depending on the place of the damage."""

UNKNOWN = 1000 << 3  # the tag of a field that no message has


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Start one fl-server for all tests of this file, which must survive all offers."""
    with Fleet(tmp_path_factory.mktemp("offers"), {"keep_update_rounds": 100}) as fleet:
        yield fleet


def named(header: bytes, digest: str = name_of(PAYLOAD)) -> pb.UpdateOffer:
    """Return a valid offer of these header bytes and this payload digest."""
    return pb.UpdateOffer(header=header, payload_digest=digest, name=update_name(header, digest))


def push(wire: WireClient, way: str, offer: pb.UpdateOffer) -> pb.Accepted:
    """Push PAYLOAD with this offer and this call; return the answer."""
    if way == "PushSmallUpdates":
        return wire.push_small(offer, PAYLOAD)
    reply = wire.push(offer, PAYLOAD)
    assert reply is not None
    return reply.accepted


def refusal(wire: WireClient, way: str, offer: pb.UpdateOffer) -> Refused:
    """Push with this offer, which must be refused; return the error."""
    with pytest.raises(Refused) as refused:
        push(wire, way, offer)
    return refused.value


def samples(server: Fleet, round_: int) -> list[tuple[object, ...]]:
    """Return the numbers of samples of the round's accepted updates."""
    return ask(server.directory / "state" / "server", "SELECT num_samples FROM updates WHERE round = ?", round_)


def fields(message: bytes) -> Iterator[bytes]:
    """Yield the fields of a serialised message in order; it knows the wire types that headers have."""
    at = 0
    while at < len(message):
        start, (tag, at) = at, read_varint(message, at)
        match tag & 7:
            case 0:
                _, at = read_varint(message, at)
            case 1:
                at += 8
            case _:
                length, at = read_varint(message, at)
                at += length
        yield message[start:at]


def longer(number: bytes) -> bytes:
    """Return the same varint with two more bytes than it needs."""
    return number[:-1] + bytes([number[-1] | 0x80, 0x80, 0])


def serialisations(header: pb.UpdateHeader) -> dict[str, bytes]:
    """Return serialisations of the same header, as other implementations of protobuf may write it."""
    plain = header.SerializeToString(deterministic=True)
    parts = list(fields(plain))
    group = varint(UNKNOWN | 3) + varint(UNKNOWN | 4)
    unknown = varint(UNKNOWN) + b"\x07" + varint(UNKNOWN | 2) + b"\x03abc" + group
    room = MAX_HEADER_BYTES - len(plain) - len(varint(UNKNOWN | 2)) - 3
    return {
        "plain": plain,
        "in another order": b"".join(reversed(parts)),
        "with fields of later versions": plain + unknown,
        "with those first": unknown + plain,
        "with a default that need not be said": plain + bytes([9 << 3 | 1]) + bytes(8),
        "with a number in more bytes than it takes": plain + b"\x10" + longer(varint(header.round)),
        "with a field twice": b"\x0a\x01x" + plain,
        "as long as may be": plain + varint(UNKNOWN | 2) + varint(room) + bytes(room),
    }


@pytest.mark.parametrize("way", WAYS)
def test_a_header_may_be_serialised_in_any_way_and_each_is_another_update(
    server: Fleet, control: Control, wire: WireClient, way: str
) -> None:
    count = 8
    run(control, rounds=count)
    for number in range(count):
        command = wire.expect("train")
        base = parameters(wire, command.model_version)
        header = wire.header(command, PAYLOAD, train_seconds=0, metrics={"a": 1.0, "b": 2.0, "c": 3.0})
        offers = {name: named(sent) for name, sent in serialisations(header).items()}
        assert len({offer.name for offer in offers.values()}) == count
        name = list(offers)[number]
        assert not push(wire, way, offers[name]).already, name
        np.testing.assert_array_equal(
            parameters(wire, published_version(control, command.round)), base + np.arange(1, SIZE + 1, dtype=np.float32)
        )
        assert samples(server, command.round) == [(10,)]
        for other, offer in offers.items():
            for again in WAYS:
                if other == name:
                    assert push(wire, again, offer).already, name
                else:
                    assert refusal(wire, again, offer).reason == "already_accepted_other", other


@pytest.mark.parametrize("way", WAYS)
def test_the_same_payload_with_another_header_is_another_update(
    server: Fleet, control: Control, wire: WireClient, way: str
) -> None:
    run(control)
    command = wire.expect("train")
    header = wire.header(command, PAYLOAD)
    push(wire, way, offer_of(header, PAYLOAD))
    header.packets[0].num_samples = 11
    error = refusal(wire, way, offer_of(header, PAYLOAD))
    assert (error.code, error.reason) == (StatusCode.ALREADY_EXISTS, "already_accepted_other")
    assert samples(server, command.round) == [(10,)]


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def sent(way: str, offer: pb.UpdateOffer) -> list[bytes]:
    """Return the serialised messages that carry the update."""
    offered = field(3, offer.SerializeToString())
    if way == "PushSmallUpdates":
        return [offered + field(2, PAYLOAD)]
    return [offered, field(2, field(2, PAYLOAD))]


def push_bytes(wire: WireClient, way: str, messages: list[bytes]) -> list[bytes]:
    """Send these serialised messages; return the answers."""
    call: Any = wire.channel.stream_stream(f"/fedring.v1.ClientUpdateService/{way}")
    try:
        return list(call(iter(messages), metadata=wire.metadata, timeout=SECONDS))
    except grpc.RpcError as error:
        raise Refused(error) from error


@pytest.mark.parametrize("repeat", REPEATED)
@pytest.mark.parametrize("way", WAYS)
def test_an_update_with_a_flipped_bit_is_refused_and_the_right_one_is_accepted(
    server: Fleet, control: Control, wire: WireClient, way: str, repeat: int
) -> None:
    rng = random.Random(f"{SEED} {way} {repeat}")
    run(control)
    command = wire.expect("train")
    base = parameters(wire, command.model_version)
    offer = offer_of(wire.header(command, PAYLOAD, metrics={"loss": 0.5}), PAYLOAD)
    messages = sent(way, offer)
    whole, first = b"".join(messages), len(messages[0])
    digest, name = offer.payload_digest.encode(), offer.name.encode()
    parts = {part: range(at := whole.index(part), at + len(part)) for part in (offer.header, digest, name, PAYLOAD)}
    between = [place for place in range(len(whole)) if not any(place in part for part in parts.values())]
    for place in [place for part in parts.values() for place in rng.choices(part, k=FLIPS)] + between:
        bits = 1 << rng.randrange(8)
        damaged = flip_bits(whole, place, bits)
        with pytest.raises(Refused) as refused:
            push_bytes(wire, way, [damaged[:first], damaged[first:]][: len(messages)])
        is_text = place in parts[digest] or place in parts[name]
        expected = ON_THE_WAY if place in between or (is_text and bits == 0x80) else {MISMATCH}  # 0x80: no UTF-8
        assert (refused.value.code, refused.value.reason) in expected, f"bits {bits} of byte {place}: {refused.value}"
    answer = pb.Accepted() if way == "PushSmallUpdates" else pb.UpdateReply(accepted=pb.Accepted())
    assert push_bytes(wire, way, messages)[-1] == answer.SerializeToString()
    moved = parameters(wire, published_version(control, command.round))
    np.testing.assert_array_equal(moved, base + np.arange(1, SIZE + 1, dtype=np.float32))
    assert samples(server, command.round) == [(10,)]


def nested(depth: int) -> bytes:
    """Return nested groups with an unknown tag."""
    return depth * varint(UNKNOWN | 3) + depth * varint(UNKNOWN | 4)


BAD_DIGEST, BAD_HEADER = ((StatusCode.INVALID_ARGUMENT, reason) for reason in ("bad_digest", "bad_header"))
HOSTILE: dict[str, tuple[pb.UpdateOffer, tuple[StatusCode, str]]] = {
    "a header that is too long": (named(bytes(MAX_HEADER_BYTES + 1)), BAD_HEADER),
    "one of almost 4 MiB": (named(bytes((4 << 20) - 10_000)), BAD_HEADER),
    "one of 4 MiB": (named(bytes(4 << 20)), (StatusCode.RESOURCE_EXHAUSTED, "resource_exhausted")),
    "no header": (named(b""), (StatusCode.PERMISSION_DENIED, "wrong_client")),
    "a header that is none": (named(b"\xff\xff"), BAD_HEADER),
    "a header that is no text where it must be": (named(field(1, b"\xff")), BAD_HEADER),
    "a thousand packets": (named(1000 * field(6, b"")), (StatusCode.PERMISSION_DENIED, "wrong_client")),
    "depths in a header": (named(nested(10_000)), BAD_HEADER),
    "no digest": (named(b"", ""), BAD_DIGEST),
    "a digest by SHA-256": (named(b"", hashlib.sha256(PAYLOAD).hexdigest()), BAD_DIGEST),
    "a digest in capitals": (named(b"", name_of(PAYLOAD).upper()), BAD_DIGEST),
    "a digest that is too short": (named(b"", name_of(PAYLOAD)[:-1]), BAD_DIGEST),
    "a digest by something else": (named(b"", f"blake2-{64 * '0'}"), BAD_DIGEST),
    "a path for a digest": (named(b"", "../../facts.sqlite"), BAD_DIGEST),
    "a digest of 1 MiB": (named(b"", (1 << 20) * "x"), BAD_DIGEST),
    "no name": (pb.UpdateOffer(payload_digest=name_of(PAYLOAD)), MISMATCH),
    "a name of 1 MiB": (pb.UpdateOffer(payload_digest=name_of(PAYLOAD), name=(1 << 20) * "x"), MISMATCH),
    "nothing": (pb.UpdateOffer(), MISMATCH),
}


def test_hostile_offers_are_refused(server: Fleet, control: Control, wire: WireClient) -> None:
    run(control)
    command = wire.expect("train")
    for way in WAYS:
        for what, (offer, expected) in HOSTILE.items():
            error = refusal(wire, way, offer)
            assert (error.code, error.reason) == expected, f"{what}: {error}"
            assert len(str(error)) < 1000
        with pytest.raises(Refused) as refused:
            push_bytes(wire, way, [nested(100_000)])
        assert refused.value.reason == "bad_request"
    assert wire.ended.empty()  # the session goes on
    assert not wire.push_small(offer_of(wire.header(command, PAYLOAD), PAYLOAD), PAYLOAD).already
    assert published_version(control, command.round)


def test_refused_offers_take_no_memory(server: Fleet, control: Control, wire: WireClient) -> None:
    offer, _ = HOSTILE["one of almost 4 MiB"]

    def after(count: int) -> int:
        """Push so many refused offers; return the server's memory in MiB."""
        for _ in range(count):
            assert refusal(wire, "PushUpdate", offer).reason == "bad_header"
        pages = int(Path(f"/proc/{server.server.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") >> 20

    before = after(30)
    assert after(150) - before < 120  # an earlier version kept a third of them: 200 MiB


def test_a_refused_update_ends_its_call_and_no_other(server: Fleet, control: Control) -> None:
    job_id, events = run(control, min_clients=2, rounds=2)
    with WireClient(server.listen, "a") as a, WireClient(server.listen, "b") as b:
        waiting: queue.Queue[pb.SmallUpdate | None] = queue.Queue()
        answers = b.push_many_small(iter(waiting.get, None))
        for _ in range(2):
            command, _ = a.expect("train"), b.expect("train")
            offer = offer_of(a.header(command, PAYLOAD), PAYLOAD)
            good, bad = (pb.SmallUpdate(offer=offer, payload=payload) for payload in (PAYLOAD, flip_bits(PAYLOAD, 100)))
            with pytest.raises(Refused, match="digest_mismatch"):
                list(a.push_many_small([bad, good]))
            waiting.put(pb.SmallUpdate(offer=offer_of(b.header(command, PAYLOAD), PAYLOAD), payload=PAYLOAD))
            assert not next(answers).already  # the other client's call goes on
            assert a.ended.empty()
            assert not a.push_small(offer, PAYLOAD).already
        waiting.put(None)
        for _ in events:
            pass
    assert [round_.delivered for round_ in control.rounds(job_id=job_id)] == [2, 2]
