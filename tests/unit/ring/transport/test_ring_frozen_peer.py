"""A peer that takes bytes no more, and is still connected: what this worker does with its stream never hangs."""

import socket
import struct
import threading
from collections.abc import Iterator

import pytest
from tests.ring_endpoints import SECONDS
from tests.waiting import until

from fedring.ring.options import RingOptions
from fedring.ring.transport.channels import Pulse, dial
from fedring.ring.transport.frames import MAX_PAYLOAD
from fedring.ring.transport.interface import Outgoing, Traffic
from fedring.ring.transport.stream import GrpcStream
from fedring.v1 import peer_pb2 as pb

FRAMES = 100  # more than the kernel keeps for a peer that does not read
SETTINGS, WINDOW_UPDATE = 4, 8  # types of HTTP/2 frames (RFC 9113, section 6)
ACK, INITIAL_WINDOW_SIZE, WHOLE_CONNECTION = 1, 4, 0


def http2(kind: int, flags: int, payload: bytes) -> bytes:
    return struct.pack(">HBBBI", len(payload) >> 8, len(payload) & 0xFF, kind, flags, WHOLE_CONNECTION) + payload


def answer_and_freeze(listener: socket.socket) -> socket.socket:
    """Take a connection, allow the other side to send without end, and read nothing of it."""
    caller, _ = listener.accept()
    caller.sendall(
        http2(SETTINGS, 0, struct.pack(">HI", INITIAL_WINDOW_SIZE, 2**31 - 1))
        + http2(WINDOW_UPDATE, 0, struct.pack(">I", 2**31 - 1 - 65535))
        + http2(SETTINGS, ACK, b"")
    )
    return caller


def is_stuck(stream: GrpcStream) -> bool:
    """Return whether the stream has sent a part of its frames, and sends no more."""
    before = stream.waiting_frames
    threading.Event().wait(0.5)
    return stream.waiting_frames == before < FRAMES


@pytest.fixture
def address() -> Iterator[str]:
    """Return the address of a peer that answers each connection, and freezes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken: list[socket.socket] = []

        def serve() -> None:
            for _ in range(2):  # the stream's connection, and the pulse's
                taken.append(answer_and_freeze(listener))

        serving = threading.Thread(target=serve)
        serving.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        serving.join()
        for caller in taken:
            caller.close()


def test_a_stream_to_a_peer_that_reads_no_more_can_be_closed(address: str) -> None:
    options = RingOptions(local_transport=False, lost_after_seconds=60)
    pulse = Pulse(dial(address, options, pulse=True), ended=lambda _: None)
    stream = GrpcStream(dial(address, options), pulse, me="me", checksum=False, traffic=Traffic(), ended=lambda _: None)
    stream.open(pb.Head(kind=pb.FRAME_KIND_HELLO))
    payload = memoryview(bytes(MAX_PAYLOAD))
    for _ in range(FRAMES):
        stream.send(Outgoing(pb.Head(kind=pb.FRAME_KIND_DATA), payload))
    until(lambda: is_stuck(stream))
    closing = threading.Thread(target=stream.close, daemon=True)
    closing.start()
    closing.join(SECONDS)
    assert not closing.is_alive()
