"""The frames of one peer, from its stream, memory and socket."""

import logging
import threading
from collections.abc import Iterator

import grpc

from fedring.ring.errors import BadFrame
from fedring.ring.transport.frames import GRPC_PREFIX, Frame, read
from fedring.ring.transport.interface import Traffic
from fedring.ring.transport.local import SocketReceiver
from fedring.ring.transport.memory import Inbox
from fedring.v1 import peer_pb2 as pb

log = logging.getLogger(__name__)


class Receiver:
    """Checks and orders one peer's frames.

    The thread that reads them closes it.

    Args:
        messages: The messages of the stream.
        generation: Frames of another generation are dropped.
        checksum: Whether every frame must carry a checksum.
        traffic: Counts the frames.
    """

    def __init__(self, messages: Iterator[bytes], *, generation: int, checksum: bool, traffic: Traffic) -> None:
        self.broke = False  # whether the stream broke, so that it did not end by the peer's will
        self._stream = messages
        self._generation = generation
        self._checksum = checksum
        self._traffic = traffic
        self._inbox: Inbox | None = None
        self._socket: SocketReceiver | None = None
        self._moved = False  # whether frames come over the socket now
        self._lock = threading.Lock()
        self._ended = False

    def frames(self) -> Iterator[Frame]:
        """Yield the frames in order, until the stream ends.

        Frames that repeat or belong to another generation are dropped.

        Raises:
            BadFrame: The peer sent a frame that no correct worker sends; nothing more is read.
        """
        expected = 0
        for message in self._messages():
            frame = read(message)
            head = frame.head
            self._traffic.received_bytes += len(message) + GRPC_PREFIX
            self._traffic.received_frames += 1
            ahead = head.sequence - expected & 0xFFFFFFFF  # the sequence begins again after 2^32
            if head.generation != self._generation or ahead >= 1 << 31:
                self._traffic.dropped_frames += 1
                continue
            if self._checksum and not head.HasField("checksum"):
                raise BadFrame("a frame came without a checksum: set frame_checksum on all ranks, or on none")
            if ahead:
                raise BadFrame(f"frame {head.sequence} came where {expected & 0xFFFFFFFF} was due")
            expected += 1
            if head.kind == pb.FRAME_KIND_MOVED:
                self._move()
            if head.HasField("slot"):
                if self._inbox is None:
                    raise BadFrame("a payload lies in memory that was never offered")
                frame = Frame(head, self._inbox.get(head.slot, head.length))
            yield frame

    def open_offer(self, hello: pb.Head) -> bool:
        """Open the memory and the socket that a peer offers.

        The peer is of this host. This process may be allowed to open only the memory, or nothing. To be called by
        the thread that reads the frames, before it asks for the next one.

        To be called by the thread that reads the frames, before it asks for the next one.

        Returns:
            Whether the memory is open, so that the peer may use it.

        Raises:
            BadFrame: The offer is the second one, or its memory is not a worker's.
        """
        if self._inbox is not None:
            raise BadFrame("memory is offered twice")
        try:
            self._inbox = Inbox(hello.memory)
            with self._lock:
                if hello.socket and not self._ended:
                    self._socket = SocketReceiver(hello.socket)
        # The peer may be in another container, where this process cannot open its memory or its socket. Then the
        # payloads, or all frames, stay on the stream.
        except OSError as error:
            log.info("cannot open all that a peer of this host offers: %s", error)
        return self._inbox is not None

    def end(self) -> None:
        """Stop waiting for the socket, since the stream has ended.

        Data that the socket holds can still be read.
        """
        with self._lock:
            self._ended = True
            if self._socket is not None:
                self._socket.end()

    def close(self) -> None:
        """Close the socket."""
        with self._lock:
            self._ended = True
            if self._socket is not None:
                self._socket.close()

    def _messages(self) -> Iterator[bytes]:
        """Yield the messages of the stream, then those of the socket.

        After that the stream tells how the peer left.
        """
        try:
            for message in self._stream:
                yield message
                if self._moved and self._socket is not None:
                    yield from self._socket.messages()
        except grpc.RpcError:  # it carries no detail
            self.broke = True

    def _move(self) -> None:
        if self._socket is None or self._moved:
            raise BadFrame("frames move to a socket that is not there")
        self._moved = True
