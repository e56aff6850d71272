"""Several streams to one peer: the sums are right, every stream is used, and the end of one is the end of the peer."""

import zlib

import pytest
import torch
from tests.ring_endpoints import SECONDS, Impostor, World, allreduce, memory, world
from tests.waiting import until

from fedring.ring.engine.endpoint import Endpoint
from fedring.ring.errors import BadFrame, PeerLost
from fedring.ring.options import MAX_STREAMS, RingOptions
from fedring.ring.transport.frames import MAX_PAYLOAD, read
from fedring.v1 import peer_pb2 as pb

STREAMS = 3
OPTIONS = RingOptions(streams=STREAMS, local_transport=False)
WHAT = "allreduce torch.float32 4"
TWOS = memory(torch.full((4,), 2.0)).tobytes()


@pytest.mark.parametrize("size", [2, 3])
def test_sums_are_right_whatever_streams_their_parts_take(size: int) -> None:
    count = 5 * MAX_PAYLOAD // 4 + 7  # several frames for each peer
    with world(size, OPTIONS) as made:
        for turn in range(3):
            tensors = [torch.full((count,), float(rank + turn)) for rank in range(size)]
            small = [torch.ones(5) for _ in range(size)]
            sums = [allreduce(group, tensor) for group, tensor in zip(made.groups, tensors, strict=True)]
            ones = [allreduce(group, tensor) for group, tensor in zip(made.groups, small, strict=True)]
            assert all(operation.wait(SECONDS) for operation in (*sums, *ones))
            wanted = float(sum(range(size)) + turn * size)
            assert all(bool((tensor == wanted).all()) for tensor in tensors)
            assert all(tensor.tolist() == [size] * 5 for tensor in small)


def test_a_peer_gets_every_stream_with_its_number_and_frames_take_all_of_them() -> None:
    impostor = Impostor()
    endpoint = Endpoint(OPTIONS)
    made = World([endpoint], [impostor.address])
    impostor.dial(endpoint.address)
    allreduce(made.groups[0], torch.ones(STREAMS * MAX_PAYLOAD))  # of which the peer gets a half, 4 bytes a value
    frames = [read(impostor.received.get(timeout=SECONDS)).head for _ in range(STREAMS + 2 * STREAMS)]
    hellos = [head for head in frames if head.kind == pb.FRAME_KIND_HELLO]
    assert [head.streams for head in hellos] == [STREAMS] * STREAMS
    numbers = sorted(head.sequence for head in frames)
    assert numbers.count(0) == STREAMS, "a stream does not begin with its own HELLO"
    assert numbers.count(1) > 1, "all frames took one stream"
    endpoint.close()
    impostor.close()


def twins(endpoint: Endpoint) -> tuple[Impostor, Impostor, World]:
    """Return a peer's two streams, and the world in which the endpoint is rank 0."""
    first, second = Impostor(), Impostor()
    made = World([endpoint], [first.address])
    second.address = first.address
    for one in (first, second):
        one.dial(endpoint.address, streams=2)
    return first, second, made


def test_a_peer_has_left_once_all_its_streams_have_ended() -> None:
    endpoint = Endpoint(RingOptions(local_transport=False))
    first, second, made = twins(endpoint)
    peer, values = first.address, torch.ones(4)
    operation = allreduce(made.groups[0], values)
    first.send(kind=pb.FRAME_KIND_LEAVING)
    first.send_bytes(None)  # type: ignore[arg-type]  # ends the stream
    assert first.call.result(SECONDS) == b""
    assert not endpoint.has_left(peer)
    second.send(TWOS, key="0", signature=zlib.crc32(WHAT.encode()))
    assert operation.wait(SECONDS)
    assert values.tolist() == [3.0] * 4
    second.send(kind=pb.FRAME_KIND_LEAVING)
    until(lambda: endpoint.has_left(peer))
    assert endpoint.failure is None
    for one in (endpoint, first, second):
        one.close()


def test_a_peer_is_lost_when_one_of_its_streams_breaks() -> None:
    endpoint = Endpoint(RingOptions(local_transport=False))
    first, second, made = twins(endpoint)
    operation = allreduce(made.groups[0], torch.ones(4))
    until(lambda: endpoint.traffic.received_frames == 2)  # the HELLO of each stream
    second.call.cancel()
    with pytest.raises(PeerLost, match="rank 1 is lost"):
        operation.wait(SECONDS)
    for one in (endpoint, first, second):
        one.close()


def test_a_peer_that_opens_too_many_streams_ends_the_generation() -> None:
    impostor = Impostor()
    endpoint = Endpoint()
    made = World([endpoint], [impostor.address])
    operation = allreduce(made.groups[0], torch.ones(4))
    impostor.dial(endpoint.address, streams=MAX_STREAMS + 1)
    with pytest.raises(BadFrame, match="rank 1: a peer opens 17 streams, more than 16"):
        operation.wait(SECONDS)
    endpoint.close()
    impostor.close()
