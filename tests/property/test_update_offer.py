"""Damaged offers of updates: every flipped bit is noticed, and any bytes are either a valid offer or refused."""

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from fedring.codec.digest import is_blake3, name_of, update_name
from fedring.rpc.errors import BadUpdate, DamagedOnTheWay
from fedring.server.update.admission import open_offer
from fedring.v1 import federation_pb2 as pb


def offer_of(header: bytes, payload: bytes = b"a payload") -> pb.UpdateOffer:
    """Return a valid offer of the payload."""
    digest = name_of(payload)
    return pb.UpdateOffer(header=header, payload_digest=digest, name=update_name(header, digest))


HEADERS = st.builds(
    pb.UpdateHeader,
    run_id=st.text("abc0-", max_size=32),
    epoch=st.integers(0, 2**63 - 1),
    round=st.integers(0, 2**63 - 1),
    client_id=st.text("xyz._-", max_size=128),
    base_digest=st.binary(max_size=9).map(name_of),
    schema_hash=st.binary(max_size=32),
    total_bytes=st.integers(0, 2**40),
    metrics=st.dictionaries(st.text("abc", min_size=1, max_size=8), st.floats(-1e9, 1e9), max_size=4),
)


@given(header=HEADERS, payload=st.binary(max_size=20))
def test_a_parsed_offer_has_the_header_and_payload_that_it_was_made_of(header: pb.UpdateHeader, payload: bytes) -> None:
    offered = open_offer(offer_of(header.SerializeToString(), payload))
    assert offered.header == header
    assert offered.digest == name_of(payload)


@given(header=HEADERS, data=st.data())
def test_a_bit_that_flips_in_any_field_is_noticed(header: pb.UpdateHeader, data: st.DataObject) -> None:
    offer = offer_of(header.SerializeToString() or b"\x10\x01")
    field = data.draw(st.sampled_from(["header", "payload_digest", "name"]))
    value = getattr(offer, field)
    raw = bytearray(value if field == "header" else value.encode())
    place = data.draw(st.integers(0, len(raw) - 1))
    raw[place] ^= 1 << data.draw(
        st.integers(0, 7 if field == "header" else 6)
    )  # the top bit would make the text invalid
    setattr(offer, field, bytes(raw) if field == "header" else raw.decode())
    with pytest.raises(DamagedOnTheWay):
        open_offer(offer)


@given(header=HEADERS, data=st.data())
def test_a_bit_that_flips_anywhere_in_the_message_is_noticed(header: pb.UpdateHeader, data: st.DataObject) -> None:
    sent = bytearray(offer_of(header.SerializeToString()).SerializeToString())
    place = data.draw(st.integers(0, len(sent) - 1))
    sent[place] ^= 1 << data.draw(st.integers(0, 7))
    try:
        offer = pb.UpdateOffer.FromString(bytes(sent))
    except DecodeError:
        return
    with pytest.raises(DamagedOnTheWay):
        open_offer(offer)


@given(header=HEADERS, cut=st.integers(1, 200))
def test_an_offer_that_is_cut_short_is_noticed(header: pb.UpdateHeader, cut: int) -> None:
    sent = offer_of(header.SerializeToString()).SerializeToString()
    try:
        offer = pb.UpdateOffer.FromString(sent[: -min(cut, len(sent))])
    except DecodeError:
        return
    with pytest.raises(DamagedOnTheWay):
        open_offer(offer)


@given(header=st.binary(max_size=300), digest=st.text(max_size=80), name=st.none() | st.text(max_size=80))
def test_random_fields_are_either_a_valid_offer_or_refused(header: bytes, digest: str, name: str | None) -> None:
    true = update_name(header, digest)
    offer = pb.UpdateOffer(header=header, payload_digest=digest, name=true if name is None else name)
    try:
        offered = open_offer(offer)
    except BadUpdate:
        assert offer.name == true
        if is_blake3(digest):
            with pytest.raises(DecodeError):
                pb.UpdateHeader.FromString(header)
    except DamagedOnTheWay:
        assert offer.name != true
    else:
        assert (offered.name, offered.digest) == (true, digest)
        assert offered.header == pb.UpdateHeader.FromString(header)
