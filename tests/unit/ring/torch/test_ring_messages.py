"""Messages of bytes are messages of tensors for the other rank, and fail as these do."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.ring_groups import ring_groups

from fedring.ring import CollectiveTimeout, Mismatch, NotSupported, PeerLost, RingError, RingProcessGroup
from fedring.ring.torch.messages import MOST_BYTES

Pair = list[RingProcessGroup]
SECONDS = 60.0
HEAD, BODY = b"head", torch.arange(6, dtype=torch.int16).view(2, 3).t()  # not contiguous
BYTES = HEAD + BODY.contiguous().numpy().tobytes()
TAG = 3


@pytest.fixture
def pair() -> Iterator[Pair]:
    with ring_groups(2) as groups:
        yield groups


def send(group: RingProcessGroup, head: bytes = HEAD, body: torch.Tensor = BODY) -> None:
    if operation := group.messages.send_bytes(head, body, 1, TAG, timeout=SECONDS):
        assert operation.wait(SECONDS)


def receive(group: RingProcessGroup, size: int = len(BYTES), timeout: float = SECONDS) -> bytes:
    return bytes(group.messages.receive_bytes(size, 0, TAG, timeout=timeout))


def as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def test_bytes_and_tensors_keep_their_order_at_both_ends(pair: Pair) -> None:
    first, second = pair
    got = torch.empty(len(BYTES), dtype=torch.uint8)
    for _ in range(20):  # first over the stream, and then over the socket
        send(first)
        first.send([as_tensor(b"values")], 1, TAG).wait()
        send(first, b"last", torch.empty(0))
        second.recv([got], 0, TAG).wait()
        assert got.numpy().tobytes() == BYTES
        assert receive(second, len(b"values")) == b"values"
        assert receive(second, len(b"last")) == b"last"


def test_bytes_are_written_at_once_on_one_host(pair: Pair) -> None:
    first, second = pair
    for _ in range(10_000):  # until the ranks have found that they share a host
        operation = first.messages.send_bytes(HEAD, BODY, 1, TAG, timeout=SECONDS)
        assert operation is None or operation.wait(SECONDS)
        assert receive(second) == BYTES
        if operation is None:
            return
    pytest.fail("each message took an operation")


@pytest.mark.parametrize("size", [1, 40_000, MOST_BYTES])
def test_bytes_arrive_whether_they_are_waited_for_or_not(pair: Pair, size: int) -> None:
    first, second = pair
    data = os.urandom(size)
    with ThreadPoolExecutor() as pool:
        for _ in range(20):  # more than there are slots of memory
            waiting = pool.submit(receive, second, size)
            send(first, data[:1], as_tensor(data[1:]) if size > 1 else torch.empty(0))
            assert waiting.result(SECONDS) == data
            send(first, data, torch.empty(0))
            assert receive(second, size) == data


def test_a_rank_sends_bytes_to_itself(pair: Pair) -> None:
    _, second = pair
    assert second.messages.send_bytes(HEAD, BODY, 1, TAG, timeout=SECONDS) is None
    assert bytes(second.messages.receive_bytes(len(BYTES), 1, TAG, timeout=SECONDS)) == BYTES


@pytest.mark.parametrize("asks_first", [True, False])
def test_a_rank_sends_tensors_to_itself(pair: Pair, asks_first: bool) -> None:
    _, second = pair
    got, sent = torch.zeros(3), torch.arange(3.0)
    first = [second.recv([got], 1, TAG)] if asks_first else []
    works = [*first, second.send([sent], 1, TAG)]
    works += [] if asks_first else [second.recv([got], 1, TAG)]
    assert all(work.wait() for work in works)
    assert torch.equal(got, sent)
    assert 1 not in second.world.endpoint.traffic.waits  # it has not waited for a peer


def test_a_message_of_another_size_is_a_mismatch_on_both_ranks(pair: Pair) -> None:
    first, second = pair
    send(first)
    with pytest.raises(Mismatch, match=r"rank 0 runs message torch.uint8 \[16\]"):
        receive(second, 5)
    with pytest.raises(Mismatch):
        first.barrier().wait()


def test_a_message_that_does_not_come_in_time_names_its_rank(pair: Pair) -> None:
    with pytest.raises(CollectiveTimeout, match=r"rank 0 sent nothing for message torch.uint8 \[16\]") as raised:
        receive(pair[1], timeout=0.1)
    assert raised.value.rank == 0
    with pytest.raises(CollectiveTimeout):
        receive(pair[1])


def test_a_rank_that_leaves_is_named_by_the_one_that_waits(pair: Pair) -> None:
    first, second = pair
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(receive, second)
        first.shutdown()
        with pytest.raises(PeerLost, match="rank 0 has left"):
            waiting.result(SECONDS)


def test_after_the_end_bytes_are_neither_sent_nor_received(pair: Pair) -> None:
    first, second = pair
    second.shutdown()
    with pytest.raises(RingError, match="has left the group"):
        receive(second)
    with pytest.raises(RingError):
        second.messages.send_bytes(HEAD, BODY, 0, TAG, timeout=SECONDS)
    first.shutdown()


def test_tensors_that_the_ring_does_not_carry_are_refused(pair: Pair) -> None:
    with pytest.raises(NotSupported, match="sparse"):
        pair[0].messages.send_bytes(HEAD, torch.eye(2).to_sparse(), 1, TAG, timeout=SECONDS)


def test_bytes_take_little_of_what_may_come_early() -> None:
    with ring_groups(2, max_early_bytes=1 << 20) as groups:
        assert [groups[0].messages.carries_bytes(size) for size in (4 << 10, 5 << 10)] == [True, False]


def test_what_does_not_fit_a_frame_or_must_be_recorded_takes_an_operation(pair: Pair) -> None:
    messages = pair[0].messages
    assert [messages.carries_bytes(size) for size in (0, 1, MOST_BYTES, MOST_BYTES + 1)] == [False, True, True, False]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert not messages.carries_bytes(1)
