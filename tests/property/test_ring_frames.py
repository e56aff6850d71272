"""Whatever bytes are read: they are a frame that was written, or raise BadFrame."""

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedring.ring.errors import BadFrame
from fedring.ring.transport.frames import read, write
from fedring.v1 import peer_pb2 as pb

U32 = st.integers(0, 2**32 - 1)
KEYS = st.text("0123456789./>#", max_size=64)
HEADS = st.builds(
    pb.Head, kind=st.integers(1, 5), sequence=U32, group=U32, generation=U32, key=KEYS, signature=U32, tag=U32, part=U32
)
PAYLOADS = st.binary(max_size=300)
HEAD = pb.Head(kind=pb.FRAME_KIND_DATA, sequence=7, group=9, generation=3, key="17/0.1", signature=5, tag=2, part=1)
WRITTEN = write(HEAD, b"sixteen bytes...", checksum=True)


@settings(max_examples=300, deadline=None)
@given(HEADS, PAYLOADS, st.booleans())
def test_read_inverts_write(head: pb.Head, payload: bytes, checksum: bool) -> None:
    message = write(head, payload, checksum=checksum)
    frame = read(message)
    assert frame.head.HasField("checksum") == checksum
    assert (frame.head, bytes(frame.payload)) == (head, payload)
    assert (len(message) - len(payload)) % 16 == 0
    parsed = pb.Frame.FromString(message)
    assert parsed.payload == payload


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=200) | st.builds(lambda tail: WRITTEN[:40] + tail, st.binary(max_size=60)))
def test_random_bytes_raise_only_bad_frame(message: bytes) -> None:
    with contextlib.suppress(BadFrame):
        read(message)


@given(HEADS, PAYLOADS, st.binary(min_size=1, max_size=40), st.data())
def test_every_truncation_and_every_extension_is_refused(
    head: pb.Head, payload: bytes, more: bytes, data: st.DataObject
) -> None:
    message = write(head, payload)
    cut = data.draw(st.integers(0, len(message) - 1))
    for wrong in (message[:cut], message + more):
        with pytest.raises(BadFrame):
            read(wrong)


def test_no_flipped_bit_of_a_frame_with_a_checksum_changes_what_is_read() -> None:
    noticed = 0
    for place in range(8 * len(WRITTEN)):
        damaged = bytearray(WRITTEN)
        damaged[place // 8] ^= 1 << place % 8
        try:
            frame = read(bytes(damaged))
        except BadFrame:
            noticed += 1
        else:  # a bit of the padding; or no checksum is found, and an endpoint that asks for one refuses the frame
            intact = (frame.head, bytes(frame.payload)) == (HEAD, b"sixteen bytes...")
            assert intact or not frame.head.HasField("checksum")
    assert noticed > 0.8 * 8 * len(WRITTEN)


@settings(max_examples=200, deadline=None)
@given(HEADS, PAYLOADS, st.data())
def test_without_a_checksum_a_flipped_bit_never_changes_how_much_is_read(
    head: pb.Head, payload: bytes, data: st.DataObject
) -> None:
    damaged = bytearray(write(head, payload))
    place = data.draw(st.integers(0, 8 * len(damaged) - 1))
    damaged[place // 8] ^= 1 << place % 8
    with contextlib.suppress(BadFrame):
        assert len(read(bytes(damaged)).payload) == len(payload)
