"""A link to a peer over one gRPC stream.

Frames wait in a queue for the thread with which gRPC asks for messages.
"""

import queue
import threading
from collections.abc import Callable
from typing import Any

import grpc

from fedring.ring.transport.channels import EXCHANGE, GENERATION_KEY, PEER_KEY, Pulse, close
from fedring.ring.transport.frames import GRPC_PREFIX, Bytes, write
from fedring.ring.transport.interface import Outgoing, Traffic
from fedring.rpc.errors import status_of
from fedring.v1 import peer_pb2 as pb

PROBE_SECONDS = 2.0
"""How long a peer that does not come is asked for the reason."""


class GrpcStream:
    """A `Transport` over a gRPC stream.

    Args:
        channel: The channel to the peer, which the stream closes at the end.
        pulse: The pulse of the same peer, which the stream closes at the end.
        me: This worker's address.
        checksum: Whether frames carry checksums.
        traffic: Counts the frames.
        ended: See `Transport`.
    """

    def __init__(
        self,
        channel: grpc.Channel,
        pulse: Pulse,
        *,
        me: str,
        checksum: bool,
        traffic: Traffic,
        ended: Callable[[str], None],
    ) -> None:
        self.sequence = 0  # the number of the next frame; frames carry it modulo 2^32
        self._channel = channel
        self._pulse = pulse
        self._me = me
        self._checksum = checksum
        self._traffic = traffic
        self._ended = ended
        self._call: Any = None
        self._queue: queue.SimpleQueue[Outgoing | memoryview | None] = queue.SimpleQueue()
        self._writing = threading.Lock()  # held while a payload is copied
        self._given_up = False
        self._closed = threading.Event()

    def open(self, hello: pb.Head) -> None:
        """Send HELLO, and begin to connect."""
        self.send(Outgoing(hello))
        exchange: Any = self._channel.stream_unary(EXCHANGE)  # raw bytes both ways
        metadata = ((PEER_KEY, self._me), (GENERATION_KEY, str(hello.generation)))
        self._call = exchange.future(iter(self._next_message, None), metadata=metadata, wait_for_ready=True)
        self._call.add_done_callback(self._done)

    def send(self, frame: Outgoing) -> None:
        """Queue a frame for gRPC's thread."""
        self._queue.put(frame)

    @property
    def waiting_frames(self) -> int:
        """The number of frames that gRPC has not asked for yet."""
        return self._queue.qsize()

    def send_at_once(self, frame: Outgoing) -> bool:
        """Return False: gRPC's threads send all frames."""
        return False

    def peer_mapped(self, moved: pb.Head) -> None:
        """Do nothing: HELLO offered nothing."""

    def give_up(self, last: Outgoing) -> None:
        """Drop all unsent frames of operations, and send `last`."""
        with self._writing:
            self._given_up = True
        self.send(last)

    def leave(self, leaving: pb.Head) -> None:
        """Send a last frame."""
        self.send(Outgoing(leaving))
        self._queue.put(None)

    @property
    def is_closed(self) -> bool:
        """Whether the stream has ended."""
        return self._closed.is_set()

    def wait_until_closed(self, timeout: float) -> None:
        """Wait until the stream has ended, at most `timeout` seconds."""
        self._closed.wait(timeout)

    def has_unsent(self) -> bool:
        """Return whether frames of operations are unsent, and drop them.

        This is so only once the stream has ended.
        """
        unsent = False
        while self.is_closed and not self._queue.empty():
            try:
                frame = self._queue.get_nowait()
            except queue.Empty:  # gRPC's thread was faster
                break
            unsent |= isinstance(frame, Outgoing) and frame.sent is not None
        return unsent

    def obstacle(self) -> str:
        """Ask the peer, and return why it cannot be reached."""
        probe: Any = self._channel.unary_unary(EXCHANGE)
        try:
            probe(b"", timeout=PROBE_SECONDS)
        except grpc.RpcError as error:
            return str(error.details()) if status_of(error) is grpc.StatusCode.UNAVAILABLE else ""
        return ""

    def cut(self) -> None:
        """End the stream at once."""
        self._queue.put(None)
        self._call.cancel()

    def close(self) -> None:
        """Cut the stream, and close its channel and its pulse."""
        self.cut()
        close(self._channel)
        self._pulse.close()

    def _next_message(self) -> Bytes | None:
        """Wait for the next message; return None after the last one.

        gRPC calls this on a thread of its own.
        """
        while (frame := self._queue.get()) is not None:
            if (message := self._written(frame)) is not None:
                return message
        return None

    def _written(self, item: Outgoing | memoryview) -> Bytes | None:
        """Return an item of the queue as a message.

        Its operation is told that the payload has been copied.
        """
        if isinstance(item, memoryview):
            return item
        message = self._encode(item)
        if item.sent is not None and message is not None:
            item.sent()
        return message

    def _encode(self, frame: Outgoing) -> bytes | None:
        """Return the next message, or None for a dropped frame."""
        with self._writing:
            if self._given_up and frame.sent is not None:
                return None
            frame.head.sequence = self.sequence & 0xFFFFFFFF
            message = self._message(frame)
            self.sequence += 1
        self._traffic.sent_bytes += len(message) + GRPC_PREFIX
        self._traffic.sent_frames += 1
        return message

    def _message(self, frame: Outgoing) -> bytes:
        return write(frame.head, frame.payload, checksum=self._checksum)

    def _done(self, call: Any) -> None:
        self._closed.set()
        if call.code() is not grpc.StatusCode.OK:
            self._ended(f"{call.code().name.lower()}: {call.details()}")
