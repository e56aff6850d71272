"""A link to a peer over several gRPC streams.

Each stream has a connection of its own, for lines that one connection cannot fill.

One TCP connection sends at most one window of bytes for each round trip, and a loss on the way halves its rate. So on a
long line several connections are faster than one, as the round-robin process groups of PyTorch DDP (Li et al. 2020,
section 5.4) and the parallel streams of GridFTP are. Frames may overtake each other: an operation finds its parts by
their numbers. The peer has left once each stream has carried LEAVING.
"""

import time
from collections.abc import Sequence

from fedring.ring.transport.interface import Outgoing
from fedring.ring.transport.stream import GrpcStream
from fedring.v1 import peer_pb2 as pb


class Streams:
    """A `Transport` over several gRPC streams to one peer.

    The stream with the fewest waiting frames sends next.

    Args:
        streams: The streams, at least one.
    """

    def __init__(self, streams: Sequence[GrpcStream]) -> None:
        self._streams = list(streams)

    def open(self, hello: pb.Head) -> None:
        """Send HELLO on each stream, and begin to connect.

        HELLO carries the number of streams.
        """
        hello.streams = len(self._streams)
        for stream in self._streams:
            stream.open(_copy(hello))

    def send(self, frame: Outgoing) -> None:
        """Queue a frame on one of the streams."""
        min(self._streams, key=lambda stream: stream.waiting_frames).send(frame)

    def send_at_once(self, frame: Outgoing) -> bool:
        """Return False: gRPC's threads send all frames."""
        return False

    def peer_mapped(self, moved: pb.Head) -> None:
        """Do nothing: HELLO offered nothing."""

    def give_up(self, last: Outgoing) -> None:
        """Drop all unsent frames of operations, and send `last` everywhere."""
        for stream in self._streams:
            stream.give_up(last._replace(head=_copy(last.head)))

    def leave(self, leaving: pb.Head) -> None:
        """Send a last frame on each stream."""
        for stream in self._streams:
            stream.leave(_copy(leaving))

    @property
    def is_closed(self) -> bool:
        """Whether one of the streams has ended."""
        return any(stream.is_closed for stream in self._streams)

    def wait_until_closed(self, timeout: float) -> None:
        """Wait until all streams have ended, at most `timeout` seconds."""
        end = time.monotonic() + timeout
        for stream in self._streams:
            stream.wait_until_closed(max(0.0, end - time.monotonic()))

    def has_unsent(self) -> bool:
        """Return whether frames of operations are unsent, and drop them.

        This is so only once a stream has ended.
        """
        unsent = [stream.has_unsent() for stream in self._streams]  # asked of all, so that all drop theirs
        return any(unsent)

    def obstacle(self) -> str:
        """Ask the peer, and return why it cannot be reached."""
        return self._streams[0].obstacle()

    def cut(self) -> None:
        """End all streams at once."""
        for stream in self._streams:
            stream.cut()

    def close(self) -> None:
        """Cut all streams, and close their channels and their pulse."""
        for stream in self._streams:
            stream.close()


def _copy(head: pb.Head) -> pb.Head:
    """Return a copy of a head.

    Each stream writes its own sequence number into it.
    """
    copy = pb.Head()
    copy.CopyFrom(head)
    return copy
