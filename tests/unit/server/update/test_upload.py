"""The state machine of an upload: events in, effects out, without a connection and without a disk."""

from dataclasses import replace

import numpy as np
import pytest

from fedring.codec import Encoding, encode
from fedring.codec.digest import name_of, update_name
from fedring.codec.errors import CodecError
from fedring.codec.schema import Entry, Schema
from fedring.rpc.chunks import CHUNK_BYTES
from fedring.rpc.errors import FedringError, UnknownRound
from fedring.secure.masks import Width, masked_packet
from fedring.server.aggregation.terms import Terms
from fedring.server.model.transforms.masked import MaskedForm
from fedring.server.update.upload import (
    Accept,
    Accepted,
    Admit,
    Admitted,
    AskRound,
    Chunk,
    Digested,
    Done,
    Effect,
    Ended,
    Event,
    Known,
    LookUp,
    Offered,
    Open,
    Opened,
    Read,
    ReplySent,
    Send,
    TakeDigest,
    TooLate,
    Upload,
    Write,
    Written,
)
from fedring.v1 import federation_pb2 as pb

SIZE = 20_000
SCHEMA = Schema((Entry("weight", (SIZE,), "float32", "parameter"),))
PAYLOAD = encode(np.ones(SIZE, np.float32), Encoding("fp32"))
HALF = len(PAYLOAD) // 2
TERMS = Terms("blake3-" + "0" * 64, 1 << 20, SCHEMA)
CLOSED = UnknownRound("round 7 is closed", reason="round_closed")


def offer(payload: bytes = PAYLOAD, encoding: str = "fp32", **changes: object) -> pb.UpdateOffer:
    size = len(payload) if encoding == "masked" else len(PAYLOAD)
    packet = pb.Packet(vector=pb.VECTOR_PARAMETERS, kind=pb.KIND_DELTA, encoding=encoding, bytes=size)
    packet.num_samples = 3
    header = pb.UpdateHeader(run_id="run", round=7, client_id="a", packets=[packet], total_bytes=len(PAYLOAD))
    header.base_digest, header.schema_hash = TERMS.base_digest, SCHEMA.hash
    for name, value in changes.items():
        setattr(header, name, value)
    data, digest = header.SerializeToString(), name_of(payload)
    return pb.UpdateOffer(header=data, payload_digest=digest, name=update_name(data, digest))


def after(*events: Event, upload: Upload | None = None) -> Effect:
    """Return the effect of the last of the events."""
    upload = upload or Upload("a", epoch=5)
    return [upload.handle(event) for event in events][-1]


RECEIVED = (
    *(Offered(offer()), Known(""), TERMS, Opened(0), ReplySent()),
    *(Chunk(0, PAYLOAD[:HALF]), Written(), Chunk(HALF, PAYLOAD[HALF:]), Written()),
)
"""The events of an upload until its payload is complete."""


def test_each_event_returns_the_next_effect() -> None:
    upload = Upload("a", epoch=5)
    opened = upload.handle(Offered(offer())), upload.handle(Known("")), upload.handle(TERMS)
    assert opened[:2] == (LookUp("run", 7), AskRound("run", 7))
    assert isinstance(opened[2], Open)
    assert opened[2].name.startswith("7-")
    assert upload.handle(Opened(0)) == Send(0)
    assert upload.handle(ReplySent()) == Read("run", 7)
    assert upload.handle(Chunk(0, PAYLOAD[:HALF])) == Write(PAYLOAD[:HALF])
    assert upload.handle(Written()) == Read("run", 7)
    assert upload.handle(Chunk(HALF, PAYLOAD[HALF:])) == Write(PAYLOAD[HALF:])
    assert upload.handle(Written()) == TakeDigest()
    admit = upload.handle(Digested(name_of(PAYLOAD)))
    assert isinstance(admit, Admit)
    assert admit.schema == SCHEMA
    accept = upload.handle(Admitted(2.0, 9.0))
    assert isinstance(accept, Accept)
    row = accept.row
    assert (row.round, row.client_id, row.num_samples, row.norm, row.epoch) == (7, "a", 3, 2.0, 5)
    assert (row.blob, row.payload, row.name) == (name_of(PAYLOAD), b"", offer().name)
    assert upload.handle(Accepted(already=False)) == Done(already=False)


def test_an_upload_continues_where_the_previous_attempt_ended() -> None:
    upload = Upload("a", epoch=0)
    assert after(*RECEIVED[:3], Opened(HALF), upload=upload) == Send(HALF)
    assert upload.handle(ReplySent()) == Read("run", 7)
    assert upload.handle(Chunk(HALF, PAYLOAD[HALF:])) == Write(PAYLOAD[HALF:])


def test_a_file_that_is_longer_than_the_payload_is_started_again() -> None:
    assert after(*RECEIVED[:3], Opened(len(PAYLOAD) + 1)) == replace(opened(), fresh=True)


def test_a_payload_that_was_received_already_is_not_requested_again() -> None:
    assert after(*RECEIVED[:3], Opened(len(PAYLOAD)), ReplySent()) == TakeDigest()


def test_an_update_that_was_accepted_before_is_done_at_once() -> None:
    assert after(Offered(offer()), Known(offer().name)) == Done(already=True)


@pytest.mark.parametrize(
    ("events", "reason", "spoilt"),
    [
        ([Offered(offer(client_id="b"))], "wrong_client", False),
        ([Offered(offer()), Known("blake3-another")], "already_accepted_other", False),
        ([Offered(offer()), TooLate(CLOSED)], "round_closed", False),
        ([Offered(offer(base_digest="another")), Known(""), TERMS], "wrong_model", False),
        ([Offered(offer()), Known(""), replace(TERMS, most_bytes=9)], "too_large", False),
        ([Offered(offer(schema_hash=b"x" * 32)), Known(""), TERMS], "wrong_schema", False),
        ([*RECEIVED[:5], Chunk(1, b"x")], "bad_chunk", False),
        ([*RECEIVED[:5], Chunk(0, b"")], "bad_chunk", False),
        ([*RECEIVED[:5], Chunk(0, bytes(CHUNK_BYTES + 1))], "bad_chunk", False),
        ([*RECEIVED[:5], Chunk(0, PAYLOAD + b"x")], "too_large", True),
        ([*RECEIVED[:7], Ended()], "truncated", False),
        ([*RECEIVED, Digested("blake3-another")], "digest_mismatch", True),
        ([*RECEIVED[:3], Opened(len(PAYLOAD)), ReplySent(), Digested("blake3-another")], "damaged", True),
    ],
)
def test_a_refusal_has_a_reason_and_says_whether_the_received_bytes_are_of_use(
    events: list[Event], reason: str, spoilt: bool
) -> None:
    upload = Upload("a", epoch=0)
    for event in events[:-1]:
        upload.handle(event)
    with pytest.raises((FedringError, CodecError)) as refused:
        upload.handle(events[-1])
    assert isinstance(refused.value, FedringError | CodecError)
    assert (refused.value.reason, upload.spoilt) == (reason, spoilt)


@pytest.mark.parametrize("received", [5, 7, len(RECEIVED)])
def test_an_update_whose_round_has_closed_may_have_been_accepted_by_an_earlier_attempt(received: int) -> None:
    for name, then in ((offer().name, Done(already=True)), ("", None)):
        upload = Upload("a", epoch=0)
        assert after(*RECEIVED[:received], TooLate(CLOSED), upload=upload) == LookUp("run", 7)
        if then is not None:
            assert upload.handle(Known(name)) == then
            continue
        with pytest.raises(UnknownRound) as refused:
            upload.handle(Known(name))
        assert refused.value is CLOSED


def opened() -> Open:
    effect = after(*RECEIVED[:3])
    assert isinstance(effect, Open)
    return effect


def test_what_the_client_says_of_its_data_is_not_kept_in_a_round_with_secure_aggregation() -> None:
    width = Width(SIZE, 7)
    payload = b"".join(masked_packet(np.zeros(SIZE, np.uint8), 7))
    sent = offer(payload, "masked", total_bytes=width.bytes, train_seconds=2.5)
    upload, terms = Upload("a", 0), replace(TERMS, bare=True, opaque=MaskedForm(Width(SIZE, 7)))
    for event in (Offered(sent), Known(""), terms, Opened(0), ReplySent(), Chunk(0, payload)):
        upload.handle(event)
    assert upload.handle(Written()) == TakeDigest()
    admit = upload.handle(Digested(name_of(payload)))
    assert isinstance(admit, Admit)
    assert admit.opaque == MaskedForm(width)
    accept = upload.handle(Admitted(0.0, 1.0, payload))
    assert isinstance(accept, Accept)
    assert (accept.row.num_samples, accept.row.train_seconds, accept.row.norm) == (1, 0.0, 0.0)


def test_an_update_that_is_not_masked_is_refused_before_its_payload_is_received() -> None:
    upload = Upload("a", 0)
    upload.handle(Offered(offer()))
    upload.handle(Known(""))
    with pytest.raises(CodecError, match="not_masked"):
        upload.handle(replace(TERMS, bare=True, opaque=MaskedForm(Width(SIZE, 7))))
