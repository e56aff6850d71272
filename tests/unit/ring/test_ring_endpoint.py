"""What a peer may send, and what follows: the right sum, a drop, or an error that names the rank."""

import threading
import time
import tracemalloc
import zlib
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
import torch
from tests.ring_endpoints import SECONDS, Impostor, World, allreduce, memory, nobody_listens, start, world
from tests.waiting import until

from fedring.ring.engine import collectives
from fedring.ring.engine.endpoint import LEAVE_SECONDS, Endpoint
from fedring.ring.engine.group import group_id
from fedring.ring.engine.operation import Operation
from fedring.ring.errors import BadFrame, CollectiveTimeout, Mismatch, Overrun, PeerLost, RingError
from fedring.ring.options import RingOptions
from fedring.ring.transport.frames import MAX_PAYLOAD, read, write
from fedring.ring.transport.stream import GrpcStream
from fedring.rpc.errors import reason_of
from fedring.v1 import peer_pb2 as pb

GENERATION = 5
WHAT = "allreduce torch.float32 4"
SIGNATURE = zlib.crc32(WHAT.encode())
TWOS = memory(torch.full((4,), 2.0)).tobytes()


class Pair:
    """Rank 0, which is an endpoint, and rank 1, which is an impostor."""

    def __init__(self, options: RingOptions | None = None) -> None:
        checksum = options is not None and options.frame_checksum
        self.impostor = Impostor(generation=GENERATION, checksum=checksum)
        self.endpoint = Endpoint(options, generation=GENERATION)
        self.world = World([self.endpoint], [self.impostor.address])
        self.group = self.world.groups[0]
        self.call = self.impostor.dial(self.endpoint.address)
        self.values = torch.ones(4)

    def allreduce(self) -> Operation:
        """Start the sum of the endpoint's ones and of what the impostor sends."""
        return allreduce(self.group, self.values)

    def answer(self, payload: bytes = TWOS, **head: Any) -> None:
        self.impostor.send(payload, **{"key": "0", "signature": SIGNATURE, **head})

    def wait_until_handled(self) -> None:
        """Wait until the endpoint has handled the frames that were sent so far."""
        before = self.endpoint.traffic.dropped_frames
        self.answer(generation=GENERATION - 1)
        until(lambda: self.endpoint.traffic.dropped_frames > before)

    def close(self) -> None:
        self.endpoint.close()
        self.impostor.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


def check_threes(pair: Pair, operation: Operation) -> None:
    """Check that the operation ends with the right sum."""
    assert operation.wait(SECONDS)
    assert pair.values.tolist() == [3.0] * 4


def test_a_peer_that_speaks_the_protocol_takes_part(pair: Pair) -> None:
    operation = pair.allreduce()
    pair.answer()
    check_threes(pair, operation)
    hello, data = (read(pair.impostor.received.get(timeout=SECONDS)) for _ in range(2))
    assert (hello.head.kind, hello.head.sequence) == (pb.FRAME_KIND_HELLO, 0)
    assert (data.head.kind, data.head.sequence, data.head.signature) == (pb.FRAME_KIND_DATA, 1, SIGNATURE)
    assert data.head.what == WHAT
    assert bytes(data.payload) == memory(torch.ones(4)).tobytes()


def test_a_repeated_frame_is_dropped(pair: Pair) -> None:
    operation = pair.allreduce()
    pair.answer(bytes(16), sequence=0)
    pair.answer()
    check_threes(pair, operation)
    assert pair.endpoint.traffic.dropped_frames == 1


def test_a_frame_of_another_generation_is_dropped(pair: Pair) -> None:
    operation = pair.allreduce()
    pair.answer(bytes(16), generation=GENERATION - 1, sequence=1)
    pair.answer()
    check_threes(pair, operation)
    assert pair.endpoint.traffic.dropped_frames == 1


def test_a_missing_frame_ends_the_generation(pair: Pair) -> None:
    operation = pair.allreduce()
    pair.answer(sequence=2)
    with pytest.raises(BadFrame, match="frame 2 came where 1 was due") as raised:
        operation.wait(SECONDS)
    assert raised.value.rank == 1


def test_a_part_that_comes_twice_ends_the_generation(pair: Pair) -> None:
    pair.answer()
    pair.answer()
    pair.wait_until_handled()
    with pytest.raises(BadFrame, match="twice"):
        pair.allreduce().wait(SECONDS)


def test_only_the_beginning_of_an_error_that_a_peer_reports_is_kept(pair: Pair) -> None:
    operation = pair.allreduce()
    pair.impostor.send(b"x" * (1 << 20), kind=pb.FRAME_KIND_ABORT, reason="peer_lost")
    with pytest.raises(PeerLost) as raised:
        operation.wait(SECONDS)
    assert str(raised.value) == "x" * 1000


def test_an_error_that_a_peer_reports_cannot_command_a_terminal(pair: Pair) -> None:
    operation = pair.allreduce()
    pair.impostor.send(b"a stage has failed:\n\x1b]0;title\x07 \xff", kind=pb.FRAME_KIND_ABORT)
    with pytest.raises(RingError) as raised:
        operation.wait(SECONDS)
    assert str(raised.value) == "a stage has failed:\n\\x1b]0;title\\x07 \ufffd"


@pytest.mark.parametrize("payload", [b"", TWOS[:-1], TWOS + b"!"])
def test_a_payload_of_another_size_is_a_mismatch(pair: Pair, payload: bytes) -> None:
    operation = pair.allreduce()
    pair.answer(payload)
    with pytest.raises(Mismatch, match="rank 1 sent") as raised:
        operation.wait(SECONDS)
    assert raised.value.rank == 1


@pytest.mark.parametrize(
    ("sent", "named"),
    [("broadcast torch.float32 [4] from 0", "broadcast torch.float32 [4] from 0"), ("", "another operation"),
     ("barrier\nERROR", "another operation")],
)  # fmt: skip
def test_a_mismatch_names_what_each_side_runs(pair: Pair, sent: str, named: str) -> None:
    operation = pair.allreduce()
    pair.answer(signature=1, what=sent)
    with pytest.raises(Mismatch) as raised:
        operation.wait(SECONDS)
    assert str(raised.value) == f"rank 1 runs {named}, and rank 0 runs {WHAT} (key 0)"
    assert raised.value.rank == 1
    assert pair.values.tolist() == [1.0] * 4


def test_a_timeout_names_what_the_late_rank_has_started_instead(pair: Pair) -> None:
    pair.answer(key="1>0#7.0", what="message torch.float32 [4]")
    pair.wait_until_handled()
    with pytest.raises(CollectiveTimeout) as raised:
        allreduce(pair.group, pair.values, timeout=0.1).wait(SECONDS)
    instead = "it runs message torch.float32 [4], which rank 0 has not started"
    assert str(raised.value) == f"rank 1 sent nothing for {WHAT} within the timeout of 0.1 s; {instead}"


@pytest.mark.parametrize("message", [b"", b"no frame", b"\x0a\x02\x08\x02"])
def test_bytes_that_are_no_frame_end_the_generation(pair: Pair, message: bytes) -> None:
    operation = pair.allreduce()
    pair.impostor.send_bytes(message)
    with pytest.raises(BadFrame, match="rank 1") as raised:
        operation.wait(SECONDS)
    assert raised.value.rank == 1


@pytest.mark.parametrize("size", [MAX_PAYLOAD + 1, 8 << 20])
def test_a_frame_larger_than_the_limits_ends_the_generation(pair: Pair, size: int) -> None:
    operation = pair.allreduce()
    pair.answer(bytes(size))
    with pytest.raises((BadFrame, PeerLost), match="rank 1"):
        operation.wait(SECONDS)


def test_a_stream_of_another_generation_is_refused(pair: Pair) -> None:
    stale = Impostor(generation=GENERATION - 1)
    call = stale.dial(pair.endpoint.address)
    with pytest.raises(grpc.RpcError) as raised:
        call.result(SECONDS)
    assert call.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert reason_of(raised.value) == "stale_generation"
    assert call.details() == "this worker is in another generation"  # and not in which one
    stale.close()
    operation = pair.allreduce()
    pair.answer()
    check_threes(pair, operation)


def test_a_stranger_can_neither_add_nor_abort(pair: Pair) -> None:
    stranger = Impostor(generation=GENERATION)
    call = stranger.dial(pair.endpoint.address)
    operation = pair.allreduce()
    stranger.send(b"stop", kind=pb.FRAME_KIND_ABORT, reason="peer_lost")
    stranger.send(bytes(16), key="0", signature=SIGNATURE)
    assert call.result(SECONDS) == b""
    pair.answer()
    check_threes(pair, operation)
    stranger.close()


def test_frames_that_come_before_the_group_exists_are_kept_for_it() -> None:
    impostor, endpoint = Impostor(generation=GENERATION), Endpoint(generation=GENERATION)
    impostor.dial(endpoint.address)
    impostor.send(TWOS, key="0", signature=SIGNATURE)
    until(lambda: endpoint.traffic.received_frames == 2)
    pair_world = World([endpoint], [impostor.address])
    values = torch.ones(4)
    assert allreduce(pair_world.groups[0], values).wait(SECONDS)
    assert values.tolist() == [3.0] * 4
    endpoint.close()
    impostor.close()


def test_frames_of_an_unknown_group_and_of_unknown_operations_are_bounded() -> None:
    for group in (group_id("world"), 12345):
        pair = Pair(RingOptions(max_early_bytes=1 << 20))
        for number in range(17):
            pair.impostor.send(bytes(1 << 16), key=f"later {number}", group=group)
        receive = start(pair.group, collectives.receive(1, memoryview(bytearray(1))))
        with pytest.raises(Overrun):
            receive.wait(SECONDS)
        pair.close()


@pytest.mark.parametrize("group", [group_id("world"), 12345])
def test_frames_that_come_after_too_many_take_no_memory(group: int) -> None:
    """The peer learns of the failure, but it need not stop."""
    pair = Pair(RingOptions(max_early_bytes=1 << 20))
    for _ in range(17):
        pair.impostor.send(bytes(1 << 16), key="later", group=group)
    until(lambda: pair.endpoint.failure is not None)
    tracemalloc.start()
    try:
        for _ in range(100):
            pair.impostor.send(bytes(1 << 16), key="later", group=group)
        pair.wait_until_handled()
        assert tracemalloc.get_traced_memory()[0] < 1 << 21
    finally:
        tracemalloc.stop()
        pair.close()


def test_frames_without_payload_count_as_memory_too() -> None:
    pair = Pair(RingOptions(max_early_bytes=1 << 20))
    for number in range(1100):
        pair.impostor.send(key=f"later {number}")
    receive = start(pair.group, collectives.receive(1, memoryview(bytearray(1))))
    with pytest.raises(Overrun):
        receive.wait(SECONDS)
    pair.close()


@pytest.mark.parametrize("size", [0, 16, MAX_PAYLOAD])
def test_frames_of_an_operation_under_way_are_bounded_by_what_it_expects(pair: Pair, size: int) -> None:
    operation = pair.allreduce()
    for tag in range(1, 18):
        pair.answer(bytes(size), tag=tag)
    pair.wait_until_handled()
    assert isinstance(pair.endpoint.failure, BadFrame)
    with pytest.raises(BadFrame, match=f"rank 1 sent more than {WHAT} can take") as raised:
        operation.wait(SECONDS)
    assert (raised.value.rank, raised.value.reason) == (1, "bad_frame")


def test_a_rank_that_has_sent_all_and_left_is_not_lost(pair: Pair) -> None:
    pair.answer()
    pair.impostor.send(kind=pb.FRAME_KIND_LEAVING)
    assert pair.call.result(SECONDS) == b""
    receive = start(pair.group, collectives.receive(1, memory(pair.values)), what=WHAT)
    assert receive.wait(SECONDS)
    assert pair.values.tolist() == [2.0] * 4


@pytest.mark.parametrize("begun", [False, True])
def test_a_rank_that_leaves_while_others_wait_for_it_is_lost(pair: Pair, begun: bool) -> None:
    program = collectives.receive(1, memory(pair.values))
    operation = start(pair.group, program) if begun else None
    pair.impostor.send(kind=pb.FRAME_KIND_LEAVING)
    assert pair.call.result(SECONDS) == b""
    with pytest.raises(PeerLost, match="rank 1 has left") as raised:
        (operation or start(pair.group, program)).wait(SECONDS)
    assert raised.value.rank == 1


def test_sending_to_a_rank_that_has_left_is_an_error(pair: Pair) -> None:
    pair.impostor.send(kind=pb.FRAME_KIND_LEAVING)
    assert pair.call.result(SECONDS) == b""
    with pytest.raises(PeerLost, match="rank 1 has left"):
        start(pair.group, collectives.send(1, memory(pair.values))).wait(SECONDS)


def test_a_rank_whose_stream_ends_without_a_leaving_frame_is_lost(pair: Pair) -> None:
    operation = pair.allreduce()
    until(lambda: pair.endpoint.traffic.received_frames == 1)  # a peer that has never connected may still come
    pair.impostor.close()
    with pytest.raises(PeerLost, match="rank 1 is lost") as raised:
        operation.wait(SECONDS)
    assert raised.value.rank == 1


def test_with_frame_checksum_a_flipped_bit_is_an_error_and_so_is_a_missing_checksum() -> None:
    for damage in (True, False):
        pair = Pair(RingOptions(frame_checksum=True))
        operation = pair.allreduce()
        if damage:
            message = bytearray(pair.impostor.frame(TWOS, key="0", signature=SIGNATURE))
            message[-1] ^= 1
            pair.impostor.send_bytes(bytes(message))
        else:
            pair.impostor.send_bytes(write(pair.impostor.head(key="0", signature=SIGNATURE), TWOS))
        with pytest.raises(BadFrame, match="corrupted" if damage else "without a checksum"):
            operation.wait(SECONDS)
        pair.close()


def test_with_frame_checksum_hello_carries_a_checksum_and_needs_one() -> None:
    pair = Pair(RingOptions(frame_checksum=True))
    hello = read(pair.impostor.received.get(timeout=SECONDS))
    assert hello.head.kind == pb.FRAME_KIND_HELLO
    assert hello.head.HasField("checksum")
    pair.close()
    without, endpoint = Impostor(), Endpoint(RingOptions(frame_checksum=True))
    group = World([endpoint], [without.address]).groups[0]
    without.dial(endpoint.address)
    with pytest.raises(BadFrame, match="without a checksum"):
        allreduce(group, torch.ones(4)).wait(SECONDS)
    endpoint.close()
    without.close()


@pytest.mark.slow
def test_a_rank_that_does_not_come_in_time_is_named_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedring.ring.engine.operation.GRACE_SECONDS", SECONDS)
    with world(4) as ring:
        late = [allreduce(group, torch.ones(1_000_000), timeout=5) for group in ring.groups[1:]]
        for operation in late:
            with pytest.raises(CollectiveTimeout, match="rank 0 sent nothing") as raised:
                operation.wait(SECONDS)
            assert raised.value.rank == 0


@pytest.mark.slow
def test_a_neighbour_that_never_comes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedring.ring.transport.stream.PROBE_SECONDS", SECONDS)
    with nobody_listens() as address:
        pair_world = World([Endpoint()], [address])
        with pytest.raises(PeerLost, match=r"rank 1 did not come within 0.1 s .*refused") as raised:
            pair_world.endpoints[0].wait_until_matched(pair_world.groups[0], timeout=0.1)
        assert raised.value.rank == 1
        pair_world.close()


@pytest.mark.slow
def test_closing_before_anybody_came_does_not_wait_as_long_as_for_a_connected_peer() -> None:
    with nobody_listens() as address:
        begin = time.monotonic()
        World([Endpoint()], [address]).close()
        assert time.monotonic() - begin < LEAVE_SECONDS


def test_leaving_flushes_what_was_sent() -> None:
    with world(2) as ring:
        sent, came = torch.randn(3_000_000), torch.zeros(3_000_000)
        sending = start(ring.groups[0], collectives.send(1, memory(sent)))
        sending.wait(SECONDS)
        leaving = threading.Thread(target=ring.endpoints[0].close)
        leaving.start()
        assert start(ring.groups[1], collectives.receive(0, memory(came))).wait(SECONDS)
        leaving.join(SECONDS)
        assert torch.equal(sent, came)


def test_after_a_failure_nothing_writes_to_the_tensors(pair: Pair) -> None:
    operation = pair.allreduce()
    pair.endpoint.fail(PeerLost("rank 1 is lost", rank=1))
    with pytest.raises(PeerLost):
        operation.wait(SECONDS)
    pair.answer()
    pair.wait_until_handled()
    assert pair.values.tolist() == [1.0] * 4


def test_after_a_failure_nothing_reads_the_tensors() -> None:
    busy = Impostor(generation=GENERATION)
    busy.listening.clear()
    endpoint = Endpoint(generation=GENERATION)
    group = World([endpoint], [busy.address]).groups[0]
    data = bytearray(b"good" * (16 << 20))
    operation = start(group, collectives.send(1, memoryview(data)))
    busy.reached.wait(SECONDS)
    endpoint.fail(RingError("stop"))
    with pytest.raises(RingError, match="stop"):
        operation.wait(SECONDS)
    data[:] = b"evil" * (16 << 20)
    busy.listening.set()
    kinds: list[int] = []
    while not kinds or kinds[-1] != pb.FRAME_KIND_ABORT:
        frame = read(busy.received.get(timeout=SECONDS))
        kinds.append(frame.head.kind)
        assert b"evil" not in bytes(frame.payload)
    assert len(kinds) < 16
    endpoint.close()
    busy.close()


def test_operations_after_the_end_raise(pair: Pair) -> None:
    pair.endpoint.close()
    with pytest.raises(RingError, match="has left"):
        pair.allreduce().wait(SECONDS)


def test_two_groups_of_one_name_are_refused(pair: Pair) -> None:
    with pytest.raises(RingError, match="world"):
        pair.endpoint.group("world", rank=0, members=pair.group.members)


@pytest.mark.parametrize("whose", [0, 1])
def test_a_rank_that_says_it_is_where_another_one_is_forms_no_group(pair: Pair, whose: int) -> None:
    """Frames of one would be taken for those of the other, or a rank would talk to itself."""
    members = [*pair.group.members, pair.group.members[whose]]
    with pytest.raises(RingError, match=f"several ranks say that they are at {members[whose]}"):
        pair.endpoint.group("other", rank=0, members=members)


def test_the_sequence_of_frames_begins_again_after_2_to_the_32(pair: Pair) -> None:
    last = 0xFFFFFFFF
    link = pair.endpoint.links[pair.impostor.address]
    assert isinstance(link, GrpcStream)
    until(lambda: link.sequence == 1)
    link.sequence = last
    for _ in range(2):
        start(pair.group, collectives.send(1, memory(torch.ones(4)))).wait(SECONDS)
    sequences = [read(pair.impostor.received.get(timeout=SECONDS)).head.sequence for _ in range(3)]
    assert sequences == [0, last, 0]
