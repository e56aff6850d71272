"""What one peer sends us: frames from its stream, and, on one host, from its memory and its socket."""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator

from fedring.ring.errors import BadFrame
from fedring.ring.frames import Frame, read
from fedring.ring.link import PREFIX, Traffic
from fedring.ring.memory import Inbox
from fedring.ring.nearby import Inlet
from fedring.v1 import peer_pb2 as pb

log = logging.getLogger(__name__)


class Incoming:
    """Checks and orders a peer's frames; to be closed by the thread that reads them.

    `accept()` says whether the peer's memory may be opened, and `accepted()` is called when it is.
    """

    def __init__(
        self,
        *,
        generation: int,
        checksum: bool,
        traffic: Traffic,
        accept: Callable[[], bool],
        accepted: Callable[[], None],
    ) -> None:
        self._generation = generation
        self._checksum = checksum
        self._traffic = traffic
        self._accept, self._accepted = accept, accepted
        self._inbox: Inbox | None = None
        self._inlet: Inlet | None = None
        self._moved = False
        self._lock = threading.Lock()
        self._ended = False

    def frames(self, stream: Iterable[bytes]) -> Iterator[Frame]:
        """The frames in their order, without those that repeat or belong to another generation."""
        expected = 0
        for message in self._messages(stream):
            frame = read(message)
            head = frame.head
            self._traffic.received_bytes += len(message) + PREFIX
            self._traffic.received_frames += 1
            ahead = head.sequence - expected & 0xFFFFFFFF  # the sequence begins again after 2^32
            if head.generation != self._generation or ahead >= 1 << 31:
                self._traffic.dropped_frames += 1
                continue
            if self._checksum and head.kind != pb.FRAME_KIND_HELLO and not head.HasField("checksum"):
                raise BadFrame("a frame came without a checksum: all ranks need the option, or none")
            if ahead:
                raise BadFrame(f"frame {head.sequence} came where {expected & 0xFFFFFFFF} was due")
            expected += 1
            if head.memory:
                self._open(head)
            if head.kind == pb.FRAME_KIND_MOVED:
                self._move()
            if head.HasField("slot"):
                if self._inbox is None:
                    raise BadFrame("a payload lies in memory that was never offered")
                frame = Frame(head, self._inbox.get(head.slot, head.length))
            yield frame

    def end(self) -> None:
        """The stream has ended: nobody waits for the socket."""
        with self._lock:
            self._ended = True
            if self._inlet is not None:
                self._inlet.end()

    def close(self) -> None:
        """Nothing of the socket is left."""
        with self._lock:
            self._ended = True
            if self._inlet is not None:
                self._inlet.close()

    def _messages(self, stream: Iterable[bytes]) -> Iterator[bytes]:
        """The stream's, then the socket's; when that has ended, the stream says whether the peer is lost."""
        for message in stream:
            yield message
            if self._moved and self._inlet is not None:
                yield from self._inlet.messages()

    def _move(self) -> None:
        if self._inlet is None or self._moved:
            raise BadFrame("frames move to a socket that is not there")
        self._moved = True

    def _open(self, offer: pb.Head) -> None:
        """The memory and the socket that a peer of this host offers; it goes on without what we may not open."""
        if self._inbox is not None:
            raise BadFrame("memory is offered twice")
        if not self._accept():
            return
        try:
            self._inbox = Inbox(offer.memory)
            with self._lock:
                if offer.socket and not self._ended:
                    self._inlet = Inlet(offer.socket)
        except OSError as error:
            log.info("not everything that a peer of this host offers can be opened: %s", error)
        if self._inbox is not None:
            self._accepted()
