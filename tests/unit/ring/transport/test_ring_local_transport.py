"""Ranks of one host, whose frames take a Unix socket past gRPC: the same sums, drops and errors as over a stream."""

import gc
import threading
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ring_endpoints import SECONDS, Impostor, World, allreduce, memory, start, world
from tests.waiting import until

from fedring.ring.engine import collectives
from fedring.ring.engine.endpoint import Endpoint
from fedring.ring.engine.operation import Operation
from fedring.ring.errors import BadFrame, PeerLost, RingError
from fedring.ring.options import RingOptions
from fedring.ring.transport import local, receiver
from fedring.ring.transport.frames import MAX_MESSAGE, Frame, read, write
from fedring.ring.transport.local import Offer, SameHostTransport, SocketReceiver, SocketSender, prefixed
from fedring.v1 import peer_pb2 as pb

GENERATION = 5
SIGNATURE = zlib.crc32(b"allreduce torch.float32 4")
TWOS = memory(torch.full((4,), 2.0)).tobytes()


class Neighbours:
    """Rank 0, which is an endpoint, and rank 1, which is an impostor and sends its frames over a socket."""

    def __init__(self) -> None:
        self.impostor = Impostor(generation=GENERATION, local=True)
        self.endpoint = Endpoint(generation=GENERATION)
        self.group = World([self.endpoint], [self.impostor.address]).groups[0]
        hello = pb.Head()
        self.offer = Offer()
        self.offer.describe(hello)
        self.call = self.impostor.dial(self.endpoint.address, memory=hello.memory, socket=hello.socket)
        self.hello = self.receive(pb.FRAME_KIND_HELLO)
        self.receive(pb.FRAME_KIND_MAPPED)
        sender = self.offer.accept()
        assert sender is not None
        self.socket: SocketSender = sender
        self.impostor.send(kind=pb.FRAME_KIND_MOVED)
        until(lambda: self.endpoint.traffic.received_frames == 2)
        self.values = torch.ones(4)

    def receive(self, kind: "pb.FrameKind.ValueType") -> Frame:
        """Return the next frame on the endpoint's stream, which is of this kind."""
        frame = read(self.impostor.received.get(timeout=SECONDS))
        assert frame.head.kind == kind
        return frame

    def allreduce(self) -> Operation:
        return allreduce(self.group, self.values)

    def send(self, payload: bytes = TWOS, **head: Any) -> None:
        """Send a frame over the socket."""
        given = self.impostor.head(**{"key": "0", "signature": SIGNATURE, **head})
        self.socket.push(prefixed(write(given, payload)))

    def close(self) -> None:
        self.endpoint.close()
        self.impostor.close()
        self.socket.close()
        self.offer.close()


@pytest.fixture
def pair() -> Iterator[Neighbours]:
    pair = Neighbours()
    yield pair
    pair.close()


def move_to_sockets(ring: World) -> None:
    """Add until frames between all ranks take the sockets."""
    for _ in range(1000):
        links = [link for endpoint in ring.endpoints for link in endpoint.links.values()]
        if all(isinstance(link, SameHostTransport) and link.moved for link in links):
            return
        add_ones(ring)
    pytest.fail("frames stay on the streams")


def add_ones(ring: World, count: int = 4) -> None:
    """Add ones on all ranks."""
    tensors = [torch.ones(count) for _ in ring.groups]
    running = [allreduce(group, tensor) for group, tensor in zip(ring.groups, tensors, strict=True)]
    assert all(operation.wait(SECONDS) for operation in running)
    assert all(torch.equal(tensor, torch.full((count,), float(len(tensors)))) for tensor in tensors)


@pytest.mark.parametrize("count", [4, 5_000, 3_000_000])
def test_frames_between_ranks_of_one_host_take_sockets(count: int) -> None:
    with world(3) as ring:
        move_to_sockets(ring)
        before = [(end.traffic.sent_frames, end.traffic.socket_frames) for end in ring.endpoints]
        add_ones(ring, count)
        for endpoint, (sent, moved) in zip(ring.endpoints, before, strict=True):
            assert endpoint.traffic.socket_frames - moved == endpoint.traffic.sent_frames - sent > 0


@pytest.mark.parametrize("options", [RingOptions(local_transport=False), RingOptions(frame_checksum=True)])
def test_without_the_local_transport_all_frames_take_the_streams(options: RingOptions) -> None:
    with world(2, options) as ring:
        for _ in range(10):
            add_ones(ring)
        assert all(end.traffic.socket_frames == 0 < end.traffic.sent_frames for end in ring.endpoints)


@pytest.mark.parametrize(("module", "end"), [(local, "SocketListener"), (receiver, "SocketReceiver")])
def test_where_no_socket_can_be_made_frames_take_the_streams(
    module: Any, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(module, end, refuse)
    with world(2) as ring:
        for _ in range(10):
            add_ones(ring, 20_000)
        assert all(endpoint.traffic.socket_frames == 0 < endpoint.traffic.shared_bytes for endpoint in ring.endpoints)


def test_frames_go_on_over_the_socket_where_they_ended_on_the_stream(pair: Neighbours) -> None:
    operation = pair.allreduce()
    pair.send()
    assert operation.wait(SECONDS)
    assert pair.values.tolist() == [3.0] * 4


def test_a_frame_that_is_repeated_over_the_socket_is_dropped(pair: Neighbours) -> None:
    operation = pair.allreduce()
    pair.send(bytes(16), sequence=0)
    pair.send(bytes(16), sequence=2, generation=GENERATION - 1)
    pair.send()
    assert operation.wait(SECONDS)
    assert pair.values.tolist() == [3.0] * 4
    assert pair.endpoint.traffic.dropped_frames == 2


def test_a_frame_that_is_missing_on_the_socket_ends_the_generation(pair: Neighbours) -> None:
    operation = pair.allreduce()
    pair.send(sequence=3)
    with pytest.raises(BadFrame, match="frame 3 came where 2 was due") as raised:
        operation.wait(SECONDS)
    assert raised.value.rank == 1


@pytest.mark.parametrize(
    "no_frame", [b"\1\0\0\0\4abcd", b"\0" + (MAX_MESSAGE + 1).to_bytes(4, "big"), prefixed(b"rubbish"), bytes(5)]
)
def test_what_is_no_frame_on_the_socket_ends_the_generation(pair: Neighbours, no_frame: bytes) -> None:
    operation = pair.allreduce()
    pair.socket.push(no_frame)
    with pytest.raises(BadFrame, match="rank 1") as raised:
        operation.wait(SECONDS)
    assert raised.value.rank == 1


def test_frames_that_move_to_no_socket_end_the_generation() -> None:
    impostor, endpoint = Impostor(), Endpoint()
    group = World([endpoint], [impostor.address]).groups[0]
    impostor.dial(endpoint.address)
    operation = allreduce(group, torch.ones(4))
    impostor.send(kind=pb.FRAME_KIND_MOVED)
    with pytest.raises(BadFrame, match="a socket that is not there"):
        operation.wait(SECONDS)
    endpoint.close()
    impostor.close()


def test_a_second_offer_ends_the_generation(pair: Neighbours) -> None:
    operation = pair.allreduce()
    pair.send(b"", kind=pb.FRAME_KIND_HELLO, memory="1:2", socket=bytes(16))
    with pytest.raises(BadFrame, match="offered twice"):
        operation.wait(SECONDS)


def test_a_rank_that_leaves_over_the_socket_is_not_lost(pair: Neighbours) -> None:
    pair.send()
    pair.send(b"", kind=pb.FRAME_KIND_LEAVING)
    assert pair.call.result(SECONDS) == b""
    receive = start(pair.group, collectives.receive(1, memory(pair.values)), what="allreduce torch.float32 4")
    assert receive.wait(SECONDS)
    assert pair.values.tolist() == [2.0] * 4


def test_what_a_lost_rank_sent_over_the_socket_before_still_counts(pair: Neighbours) -> None:
    pair.send(b"stop", kind=pb.FRAME_KIND_ABORT, reason="overrun", rank=2)
    pair.call.cancel()
    with pytest.raises(RingError, match="stop"):
        pair.allreduce().wait(SECONDS)


def test_a_stream_that_breaks_is_noticed_while_the_socket_is_quiet(pair: Neighbours) -> None:
    operation = pair.allreduce()
    pair.call.cancel()
    with pytest.raises(PeerLost, match="rank 1 is lost: its stream") as raised:
        operation.wait(SECONDS)
    assert raised.value.rank == 1


def test_half_a_frame_of_a_rank_that_is_lost_is_not_used(pair: Neighbours) -> None:
    operation = pair.allreduce()
    pair.socket.push(prefixed(write(pair.impostor.head(key="0", signature=SIGNATURE), TWOS))[:-1])
    pair.socket.cut()
    pair.call.cancel()
    with pytest.raises(PeerLost, match="rank 1 is lost: its stream"):
        operation.wait(SECONDS)
    assert pair.values.tolist() == [1.0] * 4


def test_a_rank_that_reads_nothing_keeps_nobody_waiting(pair: Neighbours, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedring.ring.engine.endpoint.ABORT_SECONDS", SECONDS)
    receiving = SocketReceiver(pair.hello.head.socket)
    pair.send(b"", kind=pb.FRAME_KIND_MAPPED)
    pair.receive(pb.FRAME_KIND_MOVED)
    data = torch.zeros(4_000)
    sending = [start(pair.group, collectives.send(1, memory(data))) for _ in range(100)]
    assert sending[0].wait(SECONDS)
    assert not sending[-1].done, "the socket holds all frames, so that nothing is tested"
    pair.endpoint.fail(RingError("stop"))
    with pytest.raises(RingError, match="stop"):
        sending[-1].wait(SECONDS)
    data += 1
    closing = threading.Thread(target=pair.endpoint.close)
    closing.start()
    frames = [read(message) for message in receiving.messages()]
    closing.join(SECONDS)
    assert not closing.is_alive()
    assert [frame.head.kind for frame in frames[-2:]] == [pb.FRAME_KIND_ABORT, pb.FRAME_KIND_LEAVING]
    assert [frame.head.sequence for frame in frames] == list(range(3, 3 + len(frames)))
    assert not any(bytes(frame.payload).strip(b"\0") for frame in frames[:-2]), (
        "the tensors are still read after the failure"
    )
    receiving.close()


def test_many_frames_of_all_sizes_come_whole_and_in_order() -> None:
    with world(2) as ring:
        move_to_sockets(ring)
        sizes = [1, 20_000, 9_000_000, 4, 300_000, 70_000, 3] * 3
        sent = [torch.randint(0, 255, (size,), dtype=torch.uint8) for size in sizes]
        came = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
        running = [start(ring.groups[0], collectives.send(1, memory(one))) for one in sent]
        running += [start(ring.groups[1], collectives.receive(0, memory(one))) for one in came]
        assert all(operation.wait(SECONDS) for operation in running)
        assert all(map(torch.equal, sent, came))


def test_generations_on_sockets_leave_neither_threads_nor_files_behind() -> None:
    def held() -> tuple[int, int]:
        gc.collect()  # gRPC's objects refer to each other
        return threading.active_count(), len([path for path in Path("/proc/self/fd").iterdir() if is_unix(path)])

    def generation(number: int) -> None:
        with world(3, generation=number) as ring:
            move_to_sockets(ring)

    generation(0)
    before = held()
    for number in range(1, 6):
        generation(number)
    until(lambda: all(now <= then for now, then in zip(held(), before, strict=True)))


def is_unix(path: Path) -> bool:
    """Return whether the file is an end of a Unix socket."""
    with suppress(OSError):
        inode = str(path.readlink()).partition("socket:[")[2][:-1]
        return bool(inode) and f" {inode} " in Path("/proc/net/unix").read_text()
    return False
