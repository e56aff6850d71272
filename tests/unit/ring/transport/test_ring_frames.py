"""Frames as large and as odd as a frame may be, and keys."""

import itertools

import numpy as np
import pytest

from fedring.ring.engine.operation import MAX_KEY, CallbackScope, inside, next_key
from fedring.ring.errors import BadFrame
from fedring.ring.transport.frames import MAX_MESSAGE, MAX_PAYLOAD, fitting_what, read, write
from fedring.v1 import peer_pb2 as pb

MAX_U32 = 2**32 - 1


def largest_head() -> pb.Head:
    head = pb.Head(kind=pb.FRAME_KIND_DATA, key="k" * MAX_KEY)
    for name in ("sequence", "group", "generation", "signature", "tag", "part", "slot", "length"):
        setattr(head, name, MAX_U32)
    return head


def test_the_largest_head_fits() -> None:
    head = largest_head()
    assert read(write(head, b"payload", checksum=True)).head.key == head.key


@pytest.mark.parametrize("length", [1, MAX_KEY])
def test_the_largest_head_of_a_first_part_fits_with_the_start_of_the_description(length: int) -> None:
    head = largest_head()
    head.key, head.part = "k" * length, 0
    head.what = fitting_what("w" * 1000, head.key)
    assert len(head.what) >= 10
    assert read(write(head, b"payload", checksum=True)).head.what == head.what


def test_the_largest_first_part_that_tells_how_long_all_parts_are_fits() -> None:
    head = largest_head()
    head.tag = head.part = 0
    head.slot, head.length, head.total = 7, MAX_PAYLOAD, 1 << 50
    head.what = fitting_what("w" * 1000, head.key)
    assert read(write(head)).head == head


def test_the_whole_description_of_a_usual_operation_fits() -> None:
    what = "allreduce sum torch.float32 [104857600] as torch.bfloat16"
    assert fitting_what(what, "123456") == what


def test_a_payload_of_the_largest_size_passes_and_one_byte_more_does_not() -> None:
    message = write(largest_head(), bytes(MAX_PAYLOAD))
    assert len(message) < MAX_MESSAGE
    assert len(read(message).payload) == MAX_PAYLOAD
    with pytest.raises(BadFrame, match="not laid out"):
        read(write(largest_head(), bytes(MAX_PAYLOAD + 1)))


@pytest.mark.parametrize("length", [0, 1, 127, 128, 16_383, 16_384])
def test_values_are_aligned_in_what_is_received(length: int) -> None:
    payload = read(write(pb.Head(key="17/0.1"), bytes(length))).payload
    message = payload.obj
    assert isinstance(message, bytes)
    start = len(message) - length
    assert start % 16 == 0
    assert np.frombuffer(payload, np.uint8).size == length


def test_a_head_that_is_too_long_is_refused() -> None:
    packed = pb.Head(key="k" * 200).SerializeToString()
    message = b"\x0a" + bytes((len(packed) & 0x7F | 0x80, len(packed) >> 7)) + packed + b"\x12\x00\x1a\x00"
    assert pb.Frame.FromString(message).head.key == "k" * 200
    with pytest.raises(BadFrame, match="not laid out"):
        read(message)


def test_a_head_that_cannot_be_parsed_is_refused() -> None:
    with pytest.raises(BadFrame, match="cannot be parsed"):
        read(b"\x0a\x02\x2a\x7f\x12\x00\x1a\x00")


@pytest.mark.parametrize("place", [0, -1])
def test_a_checksum_covers_head_and_payload(place: int) -> None:
    message = write(pb.Head(key="17"), b"payload", checksum=True)
    head, _, payload = message.partition(b"17")
    damaged = head + b"16" + payload if place == 0 else message[:-1] + b"!"
    with pytest.raises(BadFrame, match="corrupted"):
        read(damaged)


def test_a_long_chain_of_callbacks_has_keys_that_fit_and_differ() -> None:
    scope, keys = CallbackScope("17"), []
    for _ in range(100):
        with inside(scope):
            keys.append(next_key(itertools.repeat(0)))
        scope = scope.next_callback()
    assert len(set(keys)) == 100
    assert max(map(len, keys)) <= MAX_KEY
