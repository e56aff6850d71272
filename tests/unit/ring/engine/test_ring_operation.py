"""An operation ends once, on whatever thread, and its error says why."""

import threading
import time
import zlib
from collections.abc import Sequence

import pytest

from fedring.ring.engine.home import Home
from fedring.ring.engine.operation import Operation
from fedring.ring.engine.program import Expect, Program, Receive, Send
from fedring.ring.errors import BadFrame, Mismatch, PeerLost, RingError
from fedring.ring.transport.frames import Frame, read, write
from fedring.v1 import peer_pb2 as pb

WHAT = "exchange of 3 bytes"
LOST = PeerLost("rank 2 is lost", rank=2)


class Wire:
    """A carrier that keeps what it is given."""

    rank = 0

    def __init__(self, left: Sequence[int] = ()) -> None:
        self.home = Home()
        self.sends: list[Send] = []
        self.ends = 0
        self.waits: list[tuple[int, float]] = []
        self.failure: RingError | None = None
        self.operation: Operation | None = None
        self._left = left

    def run(self, program: Program, early: Sequence[tuple[int, Frame]] = (), *, timeout: float = 60) -> Operation:
        self.operation = Operation(self, "0", WHAT, program, timeout=timeout)
        self.operation.begin(early)
        return self.operation

    def send(self, operation: Operation, send: Send) -> None:
        self.sends.append(send)

    def ended(self, operation: Operation) -> None:
        self.ends += 1

    def waited(self, rank: int, seconds: float) -> None:
        self.waits.append((rank, seconds))

    def fail(self, error: RingError) -> None:
        self.failure = error
        assert self.operation is not None
        self.operation.fail(error)

    def has_left(self, rank: int) -> bool:
        return rank in self._left


def frame(
    payload: bytes = b"two",
    *,
    signature: int = zlib.crc32(WHAT.encode()),
    tag: int = 0,
    part: int = 0,
    total: int = 0,
) -> Frame:
    head = pb.Head(kind=pb.FRAME_KIND_DATA, key="0", signature=signature, tag=tag, part=part, total=total)
    return read(write(head, payload))


def exchange(came: list[bytes]) -> Program:
    yield Expect({1: 3}, frames=2)
    yield Send(1, b"one")
    came.append(bytes((yield Receive(1, 3))))


def test_it_ends_once_its_program_has_ended_and_all_is_sent() -> None:
    wire, came, ends = Wire(), list[bytes](), list[str]()
    operation = wire.run(exchange(came))
    operation.when_done(lambda: ends.append("before"))
    operation.arrived(1, frame())
    assert came == [b"two"]
    assert not operation.done
    operation.sent()
    operation.when_done(lambda: ends.append("after"))
    assert operation.wait(0)
    assert (ends, wire.ends) == (["before", "after"], 1)


def test_early_frames_are_used_even_from_a_rank_that_has_left() -> None:
    wire, came = Wire(left=[1]), list[bytes]()
    wire.run(exchange(came), [(1, frame())])
    assert came == [b"two"]
    assert wire.failure is None


@pytest.mark.parametrize("begun", [False, True])
def test_waiting_for_a_rank_that_has_left_fails(begun: bool) -> None:
    wire = Wire(left=[] if begun else [1])
    operation = wire.run(exchange([]))
    operation.left(2)
    if begun:
        assert wire.failure is None
        operation.left(1)
    with pytest.raises(PeerLost, match="rank 1 has left"):
        operation.wait(0)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (frame(b"four"), Mismatch),
        (frame(signature=1), Mismatch),
    ],
)
def test_a_wrong_frame_is_an_error_before_it_is_used(wrong: Frame, error: type[RingError]) -> None:
    for early in (False, True):
        wire, came = Wire(), list[bytes]()
        operation = wire.run(exchange(came), [(1, wrong)] if early else [])
        operation.arrived(1, wrong)
        with pytest.raises(error, match="rank 1"):
            operation.wait(0)
        assert came == []


def test_a_part_that_comes_twice_is_an_error() -> None:
    wire = Wire()
    operation = wire.run(exchange([]))
    operation.arrived(1, frame(tag=5))
    operation.arrived(1, frame(tag=5))
    with pytest.raises(BadFrame, match="twice"):
        operation.wait(0)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("payload", [b"", b"two"])
@pytest.mark.parametrize("source", [1, 2])
def test_a_rank_cannot_fill_the_memory_of_an_operation(source: int, payload: bytes, early: bool) -> None:
    flood = [(source, frame(payload, tag=1 + number)) for number in range(10)]
    wire = Wire()
    operation = wire.run(exchange([]), flood if early else [])
    for one in flood:
        operation.arrived(*one)
    with pytest.raises(BadFrame, match=f"rank {source} sent more than {WHAT} can take") as raised:
        operation.wait(0)
    assert raised.value.reason == "bad_frame"


def test_frames_that_were_used_make_room_for_others() -> None:
    def program() -> Program:
        yield Expect({1: 6}, frames=2)
        for part in range(10):
            yield Receive(1, 3, 0, part)

    wire = Wire()
    operation = wire.run(program())
    for part in (1, 0, 3, 2, 5, 4, 7, 6, 9, 8):
        operation.arrived(1, frame(part=part))
    assert wire.failure is None


@pytest.mark.parametrize("total", [2, 4])
def test_a_rank_that_tells_another_length_is_named_before_its_parts_have_come(total: int) -> None:
    operation = Wire().run(exchange([]))
    operation.arrived(1, frame(tag=1, total=total))
    with pytest.raises(Mismatch, match=f"rank 1 sent {total} bytes where {WHAT} has 3"):
        operation.wait(0)


def test_after_a_failure_the_program_goes_no_further() -> None:
    wire, came, ends = Wire(), list[bytes](), list[str]()
    operation = wire.run(exchange(came))
    operation.when_done(lambda: ends.append("end"))
    operation.fail(LOST)
    operation.fail(RingError("another"))
    operation.arrived(1, frame())
    operation.sent()
    with pytest.raises(PeerLost, match="rank 2 is lost") as raised:
        operation.wait(0)
    assert raised.value.rank == 2
    assert (came, ends, wire.ends) == ([], ["end"], 1)


def test_waiting_for_a_failed_operation_waits_for_the_step_under_way() -> None:
    stepping, go_on, over = threading.Event(), threading.Event(), threading.Event()

    def program() -> Program:
        yield Expect({1: 6}, frames=2)
        yield Receive(1, 3)
        stepping.set()
        go_on.wait()
        over.set()
        yield Receive(1, 3, 1)

    operation = Wire().run(program())
    step = threading.Thread(target=operation.arrived, args=(1, frame()))
    step.start()
    stepping.wait()
    operation.fail(LOST)
    threading.Timer(0.05, go_on.set).start()
    with pytest.raises(PeerLost):
        operation.wait()
    assert over.is_set()
    step.join()


def test_an_error_of_the_program_itself_ends_the_generation() -> None:
    def program() -> Program:
        yield Expect({1: 3}, frames=1)
        yield Receive(1, 3)
        raise ValueError("it does not fit")

    wire = Wire()
    operation = wire.run(program())
    operation.arrived(1, frame())
    with pytest.raises(RingError, match="it does not fit"):
        operation.wait(0)


def test_an_operation_that_waits_for_a_rank_that_has_begun_is_overdue_later() -> None:
    def second_step() -> Program:
        yield Expect({1: 3}, frames=1)
        yield Receive(1, 3, tag=1)

    before = time.monotonic()
    first, second = Wire().run(exchange([]), timeout=0), Wire().run(second_step(), timeout=0)
    after = time.monotonic()
    assert first.is_overdue(after + 0.1)
    assert not second.is_overdue(before + 0.1)
    assert second.is_overdue(after + 10)


def test_a_wait_counts_for_the_rank_that_has_not_begun() -> None:
    wire = Wire()
    operation = wire.run(exchange([]))
    operation.arrived(1, frame())
    assert [rank for rank, _ in wire.waits] == [1]
    assert wire.waits[0][1] > 0


def test_frames_that_were_there_before_cost_no_wait() -> None:
    wire = Wire()
    wire.run(exchange([]), [(1, frame())])
    assert wire.waits == []


def test_a_wait_for_a_rank_that_may_wait_itself_is_not_counted() -> None:
    def later() -> Program:
        yield Expect({1: 3}, frames=1)
        yield Receive(1, 3, tag=1)

    wire = Wire()
    wire.run(later()).arrived(1, frame(tag=1))
    assert wire.waits == []
