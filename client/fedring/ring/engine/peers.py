"""The peers of a generation, and the making of links to them."""

from collections.abc import Callable, Sequence

from fedring.ring.options import RingOptions
from fedring.ring.transport.channels import Pulse, dial, is_on_this_host
from fedring.ring.transport.interface import Traffic, Transport
from fedring.ring.transport.listener import Members
from fedring.ring.transport.local import SameHostTransport
from fedring.ring.transport.stream import GrpcStream
from fedring.ring.transport.streams import Streams


class Peers:
    """The ranks of all peers, and those that have come or left.

    It has no lock.

    Attributes:
        ranks: The rank of each peer, in the first group that has it; for errors.
        connected: The peers whose stream to this worker is open.
        left: The peers that have left in order.
    """

    def __init__(self) -> None:
        self.ranks: dict[str, int] = {}
        self.connected: set[str] = set()
        self.left: set[str] = set()
        self._leaving: dict[str, int] = {}  # the streams of a peer that have ended in order

    def enter(self, members: Sequence[str]) -> None:
        """Note the members of a group."""
        self.ranks = {peer: index for index, peer in enumerate(members)} | self.ranks

    def stream_left(self, peer: str, streams: int) -> bool:
        """Count one of the peer's streams that has ended in order.

        Returns:
            Whether the peer has left, as this was its last one.
        """
        self._leaving[peer] = self._leaving.get(peer, 0) + 1
        if self._leaving[peer] < streams:
            return False
        self.left.add(peer)
        return True

    def is_stranger(self, peer: str) -> bool:
        """Return whether the peer is in no group.

        Before the first group is entered, no peer of the generation is a stranger.
        """
        return bool(self.ranks) and peer not in self.ranks

    def name(self, peer: str) -> str:
        """Return a peer's name in errors."""
        return f"rank {self.ranks[peer]}" if peer in self.ranks else peer


class LinkMaker:
    """Makes the links of one worker.

    Args:
        options: The worker's options.
        members: Knows the identities of peers.
        me: The address of this worker.
        traffic: Where the links count.
    """

    def __init__(self, options: RingOptions, members: Members, *, me: str, traffic: Traffic) -> None:
        self._options, self._members, self._me, self._traffic = options, members, me, traffic

    def is_local(self, peer: str) -> bool:
        """Return whether a link may use the local transport.

        That transport carries no checksums, so the option `frame_checksum` excludes it.
        """
        options = self._options
        return options.local_transport and not options.frame_checksum and is_on_this_host(peer)

    def make(self, peer: str, *, lost: Callable[[str], None], stopped: Callable[[str], None]) -> Transport:
        """Return a new link to a peer, which is not open yet.

        Args:
            peer: The peer's address.
            lost: Is called with the reason when the link has broken.
            stopped: Is called with the reason when the peer does not answer any more.
        """
        name = self._members.name_of(peer)
        pulse = Pulse(dial(peer, self._options, pulse=True, name=name), ended=stopped)

        def stream(kind: type[GrpcStream]) -> GrpcStream:
            return kind(
                dial(peer, self._options, name=name),
                pulse,
                me=self._me,
                checksum=self._options.frame_checksum,
                traffic=self._traffic,
                ended=lost,
            )

        if self.is_local(peer):
            return stream(SameHostTransport)
        if self._options.streams == 1:
            return stream(GrpcStream)
        return Streams([stream(GrpcStream) for _ in range(self._options.streams)])
