"""The stream to one peer: frames go out in order, each built on the thread that sends it.

On one host the stream's frames move to a socket (see nearby.py): one that finds room there is sent by the thread that
brings it. The others, and on the stream all, wait in a queue for the thread with which gRPC asks for messages.
"""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import grpc

from fedring.ring.frames import write
from fedring.ring.memory import SMALLEST, Outbox
from fedring.ring.nearby import Offer, Outlet, prefixed
from fedring.ring.program import Bytes
from fedring.ring.pulse import Pulse
from fedring.rpc.errors import status_of
from fedring.v1 import peer_pb2 as pb

METHOD = "/fedring.v1.PeerService/Exchange"
PEER_KEY, GENERATION_KEY = "fl-peer", "fl-generation"
PREFIX = 5  # bytes that gRPC puts before a message

_PROBE = 2.0  # seconds
_AT_ONCE = 1 << 20  # bytes: larger payloads are copied while the one who brings them goes on


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
    """What has gone over a worker's streams and sockets, in bytes of messages with gRPC's prefix."""

    sent_bytes: int = 0
    sent_frames: int = 0
    socket_frames: int = 0  # of the sent ones, to ranks of this host past gRPC
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
        self.offered: Offer | None = None  # to a peer of this host
        self._outbox: Outbox | None = None  # its memory, once the peer sees it
        self._outlet: Outlet | None = None  # its socket, once the peer has come
        self._channel = channel
        self._queue: queue.SimpleQueue[Outgoing | memoryview | None] = queue.SimpleQueue()
        self._queued = 0  # frames and rests of frames that are in the queue, or taken from it and not yet sent
        self._moved = False  # the stream's last frame is written
        self._order = threading.Lock()  # of frames: nobody waits while holding it
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
        """The frame is sent after those before it; never waits for the peer."""
        with self._order:
            if not self._moved or self._queued or self._outlet is None or len(frame.payload) > _AT_ONCE:
                self._enqueue(frame)
                return
            message = self._written(frame)
            if message is None:
                return
            if rest := self._outlet.offer(message):
                self._enqueue(rest)
        if frame.sent is not None:
            frame.sent()

    def share(self, moved: pb.Head) -> None:
        """The peer sees the memory. Large payloads go there, and what follows `moved` to the socket, if it has come."""
        with self._order:
            if self.offered is None or self._outbox is not None:
                return
            self._outbox = self.offered.memory
            self._outlet = self.offered.outlet()
        if self._outlet is not None:
            self.send(Outgoing(moved, b""))

    def pending(self) -> bool:
        """Whether the stream has ended with an operation's frames unsent; they are forgotten."""
        unsent = False
        while self.closed.is_set() and not self._queue.empty():
            try:
                frame = self._queue.get_nowait()
            except queue.Empty:  # the stream's own thread was faster
                break
            unsent |= isinstance(frame, Outgoing) and frame.sent is not None
        return unsent

    def give_up(self, frame: Outgoing) -> None:
        """From now on no operation's memory is read: of what has not been sent only `frame` goes out."""
        with self._copying:
            self._given_up = True
        self.send(frame)

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
        self.send(Outgoing(head, b""))
        self._queue.put(None)

    def cut(self) -> None:
        """The stream has ended, whatever was still to be sent."""
        self._queue.put(None)
        self._call.cancel()
        if self._outlet is not None:
            self._outlet.cut()

    def close(self) -> None:
        """Nothing of the stream is left."""
        self.cut()
        self._channel.close()
        if self.pulse is not None:
            self.pulse.close()
        with self._order:  # the peer may just have seen what was offered
            if self.offered is not None:
                self.offered.close()
            self.offered = self._outbox = None  # gRPC may keep the link, and must not keep the memory
            if self._outlet is not None:
                self._outlet.close()

    def _enqueue(self, item: Outgoing | memoryview) -> None:
        """It waits for the thread of `_next_message`. The order is held."""
        self._queued += 1
        self._queue.put(item)

    def _next_message(self) -> Bytes | None:
        """Waits for the stream's next message; None after the last one. Sends what is queued for the socket."""
        while (item := self._queue.get()) is not None:
            outlet = self._outlet if self._moved else None  # before MOVED is written, which is the stream's
            message = item if isinstance(item, memoryview) else self._written(item)
            if isinstance(item, Outgoing) and item.sent is not None and message is not None:
                item.sent()
            del item  # its bytes are free before they are on the wire
            if outlet is not None and message is not None:
                outlet.push(message)
            with self._order:
                self._queued -= 1
            if outlet is None and message is not None:
                return message
        return None

    def _written(self, frame: Outgoing) -> bytes | None:
        """The next message; None if it is not to be sent any more."""
        with self._copying:
            if self._given_up and frame.sent is not None:
                return None
            frame.head.sequence = self._sequence & 0xFFFFFFFF
            message = self._message(frame)
            self._sequence += 1
        self._traffic.sent_bytes += len(message) + PREFIX
        self._traffic.sent_frames += 1
        self._traffic.socket_frames += self._moved
        message = prefixed(message) if self._moved else message
        self._moved |= frame.head.kind == pb.FRAME_KIND_MOVED
        return message

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
