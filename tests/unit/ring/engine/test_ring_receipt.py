"""A receipt ends once: with the message, or with an error that says why."""

import threading
import zlib
from collections.abc import Sequence
from typing import Any

import pytest

from fedring.ring.engine.collectives import send
from fedring.ring.engine.group import Group
from fedring.ring.engine.home import Home
from fedring.ring.engine.receipt import Receipt
from fedring.ring.errors import BadFrame, Mismatch, PeerLost, RingError
from fedring.ring.transport.frames import Frame, read, write
from fedring.ring.transport.interface import Outgoing
from fedring.v1 import peer_pb2 as pb

WHAT = "message torch.uint8 [3]"
LOST = PeerLost("rank 2 is lost", rank=2)


class Taker:
    """A taker that keeps what it is told."""

    rank = 0

    def __init__(self, left: Sequence[int] = ()) -> None:
        self.home = Home()
        self.ends = 0
        self.waits: list[int] = []
        self.failure: RingError | None = None
        signature = zlib.crc32(WHAT.encode())
        self.receipt = Receipt(self, WHAT, signature=signature, source=1, size=3, key="1>0#4.0", timeout=60)
        self._left = left

    def taken(self, receipt: Receipt) -> None:
        self.ends += 1

    def waited(self, rank: int, seconds: float) -> None:
        self.waits.append(rank)

    def fail(self, error: RingError) -> None:
        self.failure = error
        self.receipt.fail(error)

    def has_left(self, rank: int) -> bool:
        return rank in self._left


def frame(payload: bytes = b"two", *, what: str = WHAT, part: int = 0) -> Frame:
    signature = zlib.crc32(what.encode())
    return read(write(pb.Head(kind=pb.FRAME_KIND_DATA, signature=signature, part=part, what=what), payload))


def test_a_message_that_has_come_before_needs_no_wait_even_if_its_rank_has_left() -> None:
    taker = Taker(left=[1])
    assert bytes(taker.receipt.wait([(1, frame())])) == b"two"
    taker.receipt.left(1)
    taker.receipt.fail(LOST)
    assert bytes(taker.receipt.wait([])) == b"two"
    assert (taker.waits, taker.ends, taker.failure) == ([], 1, None)


def test_a_rank_may_leave_before_its_last_message_is_read() -> None:
    taker = Taker(left=[1])
    taker.receipt.left(1)
    assert bytes(taker.receipt.wait([(1, frame())])) == b"two"
    assert taker.failure is None


def test_a_message_that_comes_later_wakes_the_thread_that_waits() -> None:
    taker = Taker()
    threading.Timer(0.05, taker.receipt.arrived, (1, frame())).start()
    assert bytes(taker.receipt.wait([(2, frame()), (1, frame(part=1))])) == b"two"  # which nobody asks for
    assert (taker.waits, taker.ends) == ([1], 1)


@pytest.mark.parametrize("wrong", [frame(b"four"), frame(what="allreduce")])
def test_a_wrong_frame_ends_the_generation(wrong: Frame) -> None:
    taker = Taker()
    with pytest.raises(Mismatch, match="rank 1"):
        taker.receipt.wait([(1, wrong)])
    assert isinstance(taker.failure, Mismatch)


def test_a_frame_that_comes_twice_ends_the_generation() -> None:
    taker = Taker()
    assert bytes(taker.receipt.wait([(1, frame()), (1, frame())])) == b"two"
    assert isinstance(taker.failure, BadFrame)


@pytest.mark.parametrize("begun", [False, True])
def test_to_wait_for_a_rank_that_has_left_fails(begun: bool) -> None:
    taker = Taker(left=[] if begun else [1])
    if begun:
        taker.receipt.left(2)
        threading.Timer(0.05, taker.receipt.left, (1,)).start()
    with pytest.raises(PeerLost, match="rank 1 has left") as raised:
        taker.receipt.wait([])
    assert (raised.value.rank, taker.waits) == (1, [])


def test_a_failure_is_raised_as_a_copy() -> None:
    taker = Taker()
    taker.receipt.abandon(LOST)
    taker.receipt.arrived(1, frame())
    with pytest.raises(PeerLost, match="rank 2 is lost") as raised:
        taker.receipt.wait([])
    assert raised.value is not LOST
    assert (raised.value.rank, taker.ends) == (2, 1)


def test_it_is_overdue_after_its_timeout() -> None:
    taker = Taker()
    assert not taker.receipt.is_overdue(0)
    assert taker.receipt.is_overdue(float("inf"))


class ClosingLinks:
    """Links of a group that another thread leaves just before it is asked about failures."""

    def __init__(self) -> None:
        self.home = Home()
        self.group: Group | None = None

    @property
    def failure(self) -> RingError | None:
        if self.group is not None:
            Group.close(self.group)
        return None

    def send(self, peer: str, frame: Outgoing) -> None:
        raise AssertionError

    def send_at_once(self, peer: str, frame: Outgoing) -> bool:
        raise AssertionError

    def fail(self, error: RingError) -> None:
        raise AssertionError

    def has_left(self, peer: str) -> bool:
        return False

    def waited(self, peer: str, seconds: float) -> None:
        raise AssertionError

    def exchanged(self, seconds: float) -> None:
        raise AssertionError


def test_nobody_waits_in_a_group_that_another_thread_has_left() -> None:
    links: Any = ClosingLinks()
    group = Group(links, "group", rank=0, members=["zero", "one"], generation=1, max_early_bytes=1 << 20)
    group.operations.running = list  # type: ignore[method-assign]  # those of the moment before
    links.group = group
    with pytest.raises(RingError, match="has left the group"):
        group.receive(WHAT, source=1, size=3, key="1>0#4.0", timeout=60)
    group._closed = False
    operation = group.start(WHAT, send(1, memoryview(b"two")), timeout=60)
    with pytest.raises(RingError, match="has left the group"):
        operation.wait(60)
