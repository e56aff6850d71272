"""The stream to one peer: frames go out in order, each built on the thread that sends it."""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import grpc

from fedring.ring.frames import write
from fedring.ring.memory import SMALLEST, Outbox
from fedring.ring.program import Bytes
from fedring.ring.pulse import Pulse
from fedring.rpc.errors import status_of
from fedring.v1 import peer_pb2 as pb

METHOD = "/fedring.v1.PeerService/Exchange"
PEER_KEY, GENERATION_KEY = "fl-peer", "fl-generation"
PREFIX = 5  # bytes that gRPC puts before a message

_PROBE = 2.0  # seconds


class Outgoing(NamedTuple):
    """A frame that waits for its turn; `sent` is called once its bytes have been copied."""

    head: pb.Head
    payload: Bytes
    sent: Callable[[], None] | None = None


class Wait(NamedTuple):
    """Waits, and what they took together."""

    times: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Traffic:
    """What has gone over a worker's streams, in bytes of messages with gRPC's prefix."""

    sent_bytes: int = 0
    sent_frames: int = 0
    shared_bytes: int = 0  # payloads that a rank of this host found in memory
    received_bytes: int = 0
    received_frames: int = 0
    dropped_frames: int = 0  # repeated, or of another generation
    refused_streams: int = 0  # of a certificate that is no member's
    exchanges: int = 0  # of gradients: allreduces, and allgathers of compressed ones
    exchange_seconds: float = 0.0
    waits: dict[int, Wait] = field(default_factory=dict)  # for each rank to begin with its part of a collective

    def __add__(self, other: "Traffic") -> "Traffic":
        sums = Traffic(*(getattr(self, name) + getattr(other, name) for name in _SUMS))
        for rank in self.waits | other.waits:
            mine, theirs = (waits.get(rank, Wait()) for waits in (self.waits, other.waits))
            sums.waits[rank] = Wait(mine.times + theirs.times, mine.seconds + theirs.seconds)
        return sums


_SUMS = [field.name for field in fields(Traffic) if field.name != "waits"]


class Link:
    """An open stream to a peer; `ended(detail)` is called once, when it breaks or the peer ends it."""

    def __init__(
        self, channel: grpc.Channel, hello: pb.Head, *, me: str, traffic: Traffic, ended: Callable[[str], None]
    ) -> None:
        self.closed = threading.Event()  # the stream has ended, for whatever reason
        self.checksum = False
        self.pulse: Pulse | None = None
        self.offered: Outbox | None = None  # memory that the hello named
        self._outbox: Outbox | None = None  # it, once the peer sees it
        self._channel = channel
        self._queue: queue.SimpleQueue[Outgoing | None] = queue.SimpleQueue()
        self._traffic = traffic
        self._ended = ended
        self._sequence = 0
        self._given_up = False
        self._copying = threading.Lock()
        self.send(Outgoing(hello, b""))
        call: Any = channel.stream_unary(METHOD)  # raw bytes both ways
        metadata = ((PEER_KEY, me), (GENERATION_KEY, str(hello.generation)))
        self._call = call.future(iter(self._next_message, None), metadata=metadata, wait_for_ready=True)
        self._call.add_done_callback(self._done)

    def send(self, frame: Outgoing) -> None:
        """The frame is sent after those before it; never waits."""
        self._queue.put(frame)

    def share(self) -> None:
        """Large payloads go through the memory that was offered: the peer sees it."""
        self._outbox = self.offered

    def pending(self) -> bool:
        """Whether the stream has ended with an operation's frames unsent; they are forgotten."""
        unsent = False
        while self.closed.is_set() and not self._queue.empty():
            try:
                frame = self._queue.get_nowait()
            except queue.Empty:  # the stream's own thread was faster
                break
            unsent |= frame is not None and frame.sent is not None
        return unsent

    def give_up(self, frame: Outgoing) -> None:
        """From now on no operation's memory is read: of what has not been sent only `frame` goes out."""
        with self._copying:
            self._given_up = True
        self._queue.put(frame)

    def obstacle(self) -> str:
        """Why the peer cannot be reached; empty if it can be, or nobody knows."""
        probe: Any = self._channel.unary_unary(METHOD)
        try:
            probe(b"", timeout=_PROBE)
        except grpc.RpcError as error:
            return str(error.details()) if status_of(error) is grpc.StatusCode.UNAVAILABLE else ""
        return ""

    def leave(self, head: pb.Head) -> None:
        """Nothing is sent after this last frame."""
        self._queue.put(Outgoing(head, b""))
        self._queue.put(None)

    def cut(self) -> None:
        """The stream has ended, whatever was still to be sent."""
        self._queue.put(None)
        self._call.cancel()

    def close(self) -> None:
        """Nothing of the stream is left."""
        self.cut()
        self._channel.close()
        if self.pulse is not None:
            self.pulse.close()
        if self.offered is not None:
            self.offered.close()
            self.offered = self._outbox = None  # gRPC may keep the link, and must not keep the memory

    def _next_message(self) -> bytes | None:
        """Waits for a frame, and lets go of it before it is on the wire; None after the last one."""
        while (frame := self._queue.get()) is not None:
            with self._copying:
                if self._given_up and frame.sent is not None:
                    continue
                frame.head.sequence = self._sequence & 0xFFFFFFFF
                message = self._message(frame)
            self._sequence += 1
            if frame.sent is not None:
                frame.sent()
            size = len(message) + PREFIX
            self._traffic.sent_bytes += size
            self._traffic.sent_frames += 1
            return message
        return None

    def _message(self, frame: Outgoing) -> bytes:
        head, payload = frame.head, frame.payload
        outbox = self._outbox
        if outbox is not None and len(payload) >= SMALLEST:
            slot = outbox.put(payload)
            if slot is not None:
                head.slot, head.length = slot, len(payload)
                self._traffic.shared_bytes += len(payload)
                return write(head)
        return write(head, payload, checksum=self.checksum)

    def _done(self, call: Any) -> None:
        self.closed.set()
        if call.code() is not grpc.StatusCode.OK:
            self._ended(f"{call.code().name.lower()}: {call.details()}")
