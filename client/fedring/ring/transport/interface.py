"""The interface of a link to a peer, and a worker's counters."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import NamedTuple, Protocol

from fedring.ring.transport.frames import Bytes
from fedring.v1 import peer_pb2 as pb


class Outgoing(NamedTuple):
    """A frame to send, with a callback for its payload."""

    head: pb.Head  # complete but for the sequence number, the checksum and the slot in memory, which the link adds
    payload: Bytes = b""  # at most MAX_PAYLOAD bytes; must not change before `sent` is called
    sent: Callable[[], None] | None = None  # called once the payload has been copied; only operations' frames have it


class Wait(NamedTuple):
    """The number and the total time of waits."""

    times: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Traffic:
    """Counters of one worker's links, in both directions.

    Bytes are those of messages with gRPC's prefix.
    """

    sent_bytes: int = 0
    sent_frames: int = 0
    socket_frames: int = 0  # those of the sent frames that took a Unix socket to a rank of this host
    shared_bytes: int = 0  # payloads that a rank of this host read from shared memory
    received_bytes: int = 0
    received_frames: int = 0
    dropped_frames: int = 0  # repeated, or of another generation
    refused_streams: int = 0  # whose certificate is not a member's
    exchanges: int = 0  # of gradients: all-reduces, and allgathers of compressed gradients
    exchange_seconds: float = 0.0
    waits: dict[int, Wait] = field(default_factory=dict)  # by rank: waits for its first frame of an operation

    def __add__(self, other: "Traffic") -> "Traffic":
        sums = Traffic(*(getattr(self, name) + getattr(other, name) for name in _SUMS))
        for rank in self.waits | other.waits:
            mine, theirs = (waits.get(rank, Wait()) for waits in (self.waits, other.waits))
            sums.waits[rank] = Wait(mine.times + theirs.times, mine.seconds + theirs.seconds)
        return sums


_SUMS = [field.name for field in fields(Traffic) if field.name != "waits"]


class Transport(Protocol):
    """A link to one peer, on which frames go out in order.

    The peer's frames come in on a link of its own.

    An implementation is made with a function `ended(detail)`. It calls that function once, on a thread of its own, when
    the stream breaks or the peer refuses it; not when the peer ends the stream in order. All methods may be called from
    any thread.
    """

    def open(self, hello: pb.Head) -> None:
        """Send HELLO as the first frame, and begin to connect.

        The maker of the link calls this once, before all other methods.

        The link adds its offer to a peer of the same host to HELLO.
        """

    def send(self, frame: Outgoing) -> None:
        """Send a frame after all frames before it.

        This never waits for the peer.
        """

    def send_at_once(self, frame: Outgoing) -> bool:
        """Send a frame after those before it, if that needs no wait.

        Args:
            frame: The frame; nobody is told that its payload has been copied.

        Returns:
            Whether the frame is sent. If not, nothing has happened.
        """
        ...

    def peer_mapped(self, moved: pb.Head) -> None:
        """Use the memory and the socket that HELLO offered.

        The peer has opened them. Nothing happens if HELLO offered nothing.

        From now on large payloads may lie in memory. If the peer has connected to the socket, the frame `moved` is the
        last one on the stream, and all later ones take the socket.
        """

    def give_up(self, last: Outgoing) -> None:
        """Drop all unsent frames of operations, and send `last`.

        The memory of operations is not read any more. Frames that follow `last` are sent.
        """

    def leave(self, leaving: pb.Head) -> None:
        """Send a last frame. Nothing may be sent after it."""

    @property
    def is_closed(self) -> bool:
        """Whether the stream has ended, for whatever reason."""
        ...

    def wait_until_closed(self, timeout: float) -> None:
        """Wait until the stream has ended, at most `timeout` seconds."""

    def has_unsent(self) -> bool:
        """Return whether the stream ended with unsent frames of operations.

        Those frames are dropped.
        """
        ...

    def obstacle(self) -> str:
        """Return why the peer cannot be reached.

        Returns:
            The reason, or "" if the peer can be reached or the reason is not known.

        This asks the peer, and so may take some seconds.
        """
        ...

    def cut(self) -> None:
        """End the stream at once, even with unsent frames.

        Threads that wait for the peer to read wake up.
        """

    def close(self) -> None:
        """Cut the stream, and release its connections, socket and memory.

        A second call does nothing.
        """
