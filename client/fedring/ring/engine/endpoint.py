"""A worker's endpoint in a generation.

It has one port that all peers dial, and a link to each peer that it sends to.
"""

import logging
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from fedring.ring.engine.deadlines import DeadlineWatch
from fedring.ring.engine.group import EarlyFrames, Group
from fedring.ring.engine.home import claim
from fedring.ring.engine.peers import LinkMaker, Peers
from fedring.ring.errors import BY_REASON, BadFrame, Overrun, PeerLost, RingError
from fedring.ring.options import MAX_STREAMS, RingOptions
from fedring.ring.transport.channels import advertised
from fedring.ring.transport.frames import Frame
from fedring.ring.transport.interface import Outgoing, Traffic, Transport, Wait
from fedring.ring.transport.listener import Listener, Members, PeerService
from fedring.ring.transport.receiver import Receiver
from fedring.v1 import peer_pb2 as pb

log = logging.getLogger(__name__)

FLUSH_SECONDS = 2.0
"""How long an endpoint that closes waits for its last frames to a peer that never came."""
ABORT_SECONDS = 10.0
"""How long it waits for them after a failure, so that a busy peer learns the reason. A dead peer is noticed sooner."""
LEAVE_SECONDS = 30.0
"""How long it waits for them without a failure, over a slow line."""

_MAX_DETAIL = 1000  # bytes of an error's text that are passed on
_SWITCH = 0.0005  # seconds


class Endpoint:
    """A worker's links to its peers, in one generation.

    It listens at once; `address` is what peers dial. The first error ends it, on every rank: `failure`. The caller that
    makes it closes it.

    Args:
        options: The worker's options; None = the defaults and the environment.
        generation: Tells the frames of this generation from those of earlier ones.

    Attributes:
        home: The process of the endpoint. In its forks, all that would reach a peer raises `Forked`.

    Raises:
        RingError: The port is taken, or a file of the TLS options cannot be read.
        Forked: A process that this one was forked from has had an endpoint.
    """

    def __init__(self, options: RingOptions | None = None, *, generation: int = 0) -> None:
        self.home = claim()
        self.options = options or RingOptions()
        self.generation = generation
        self.failure: RingError | None = None
        self.traffic = Traffic()
        # Threads that move frames must not wait 5 ms, Python's default, for a thread that computes.
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH))
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._links: dict[str, Transport] = {}
        self._groups: dict[int, Group] = {}
        self._peers = Peers()
        self._early: EarlyFrames[int, str] = EarlyFrames(self.options.max_early_bytes)  # by the group's id, from a peer
        self._closed = threading.Event()
        self.members = Members(members_only=self.options.tls_members_only)
        service = PeerService(
            self.options, generation=generation, members=self.members, traffic=self.traffic, serve=self._serve
        )
        self._listener = Listener(self.options, service.exchange, service.pulse)
        self.address = advertised(self.options, self._listener.port)
        self._maker = LinkMaker(self.options, self.members, me=self.address, traffic=self.traffic)
        self._listener.start()
        self._watch = DeadlineWatch(self._groups, lock=self._lock, closed=self._closed, fail=self.fail)
        self._watch.start()

    @property
    def links(self) -> Mapping[str, Transport]:
        """The links to peers, by address."""
        return MappingProxyType(self._links)

    def group(self, name: str, *, rank: int, members: Sequence[str]) -> Group:
        """Enter a group, and connect to its neighbours in the ring.

        Args:
            name: The group's name, equal on all ranks.
            rank: This worker's rank in the group.
            members: The addresses of all ranks, of which `members[rank]` is this endpoint's.

        Raises:
            RingError: The address is another one, two ranks have the same one, the name's id is that of another group,
                or the option tls_members_only is set and the members' identities are not known.
            Forked: This process is a fork of the worker.
        """
        self.home.check()
        if not self.members.known:
            raise RingError("tls_members_only needs a rendezvous that names the members' identities")
        if members[rank] != self.address:
            raise RingError(f"rank {rank} is {members[rank]}, and this is {self.address}", rank=rank)
        if twice := next((one for one in members if members.count(one) > 1), ""):
            raise RingError(f"several ranks say that they are at {twice}")  # frames would be taken for another rank's
        group = Group(
            self,
            name,
            rank=rank,
            members=members,
            generation=self.generation,
            max_early_bytes=self.options.max_early_bytes,
        )
        with self._lock:
            if group.id in self._groups:
                raise RingError(
                    f"frames cannot tell the group {name!r} from {self._groups[group.id].name!r}: rename one of them"
                )
            self._peers.enter(members)
            self._groups[group.id] = group
            for peer in set(members) - {self.address}:
                self.traffic.waits.setdefault(self._peers.ranks[peer], Wait())
            early = self._early.take(group.id)
            connected = self._peers.connected.intersection(members)
        # Outside the lock, as for every frame: a frame may run a program and its callbacks.
        for peer, frame in early:
            if group.has_member(peer):
                group.arrived(peer, frame)
        for peer in {members[(rank + 1) % len(members)], members[rank - 1], *connected} - {self.address}:
            self._link(peer)
        return group

    def wait_until_matched(self, group: Group, *, timeout: float) -> None:
        """Wait until both neighbours have opened their streams to this worker.

        Raises:
            PeerLost: One has not come within `timeout` seconds; the error says why, if that can be found out.
            RingError: The generation has failed.
        """
        wanted = {group.members[(group.rank + 1) % group.size], group.members[group.rank - 1]} - {self.address}
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None or wanted <= self._peers.connected, timeout)
            if self.failure:
                raise self.failure
            missing = min(wanted - self._peers.connected, key=group.members.index, default="")
        # Ask the peer outside the lock: the answer takes seconds, and frames of others must get through.
        if missing:
            link = self._link(missing)
            obstacle = link.obstacle() if link else ""
            rank = self._peers.ranks[missing]
            detail = f"rank {rank} did not come within {timeout:g} s" + (f" ({obstacle})" if obstacle else "")
            error = PeerLost(detail, rank=rank)
            self.fail(error)
            raise error

    def send(self, peer: str, frame: Outgoing) -> None:
        """Send a frame to the peer, after all frames before it.

        If the peer is gone, the generation ends.
        """
        self.home.check()
        if peer in self._peers.left:
            detail = f"{self._peers.name(peer)} has left, and there is more for it"
            self.fail(PeerLost(detail, rank=self._peers.ranks.get(peer)))
        elif link := self._links.get(peer) or self._link(peer):
            link.send(frame)
            if link.is_closed:
                self._lost(peer, "its stream has ended")

    def send_at_once(self, peer: str, frame: Outgoing) -> bool:
        """Send a frame, if that needs no wait.

        Nobody is told that its payload has been copied.

        Returns:
            Whether it is sent. If not, `send` sends it, or finds out why it cannot.
        """
        self.home.check()
        link = self._links.get(peer)
        if link is None or peer in self._peers.left or not link.send_at_once(frame):
            return False
        if link.is_closed:
            self._lost(peer, "its stream has ended")
        return True

    def has_left(self, peer: str) -> bool:
        """Return whether the peer has left in order.

        Then no more frames come from it.
        """
        return peer in self._peers.left

    def waited(self, peer: str, seconds: float) -> None:
        """Count a wait of an operation for the peer to begin.

        This worker is no peer of itself, and a wait for its own message does not count.
        """
        if peer == self.address:
            return
        with self._lock:
            rank = self._peers.ranks[peer]
            before = self.traffic.waits[rank]
            self.traffic.waits[rank] = Wait(before.times + 1, before.seconds + seconds)

    def exchanged(self, seconds: float) -> None:
        """Count an exchange of gradients that has ended."""
        with self._lock:
            self.traffic.exchanges += 1
            self.traffic.exchange_seconds += seconds

    def fail(self, error: RingError) -> None:
        """End the generation with an error, on every rank.

        Every operation of this worker raises the error, and every peer gets it once. A fork of the worker ends nothing.
        """
        if not self.home.is_here:
            return
        with self._changed:
            if self.failure or self._closed.is_set():
                return
            self.failure = error
            groups, links = list(self._groups.values()), list(self._links.values())
            self._changed.notify_all()
        log.warning("generation %d has failed: %s", self.generation, error)
        for link in links:
            link.give_up(_abort(error, self.generation))
        for group in groups:
            group.failed(error)

    def forget(self, group: Group) -> None:
        """Leave a group."""
        if not self.home.is_here:
            return
        with self._lock:
            self._groups.pop(group.id, None)
        group.close()

    def close(self) -> None:
        """Leave all peers in order, and release everything.

        This never hangs, whatever has failed before. In a fork of the worker it does nothing.
        """
        if not self.home.is_here:
            return
        with self._changed:
            if self._closed.is_set():
                return
            self._closed.set()
            patience = dict.fromkeys(self._links, ABORT_SECONDS if self.failure else LEAVE_SECONDS)
            patience |= dict.fromkeys(self._links.keys() - self._peers.connected, FLUSH_SECONDS)
            self.failure = self.failure or RingError("this worker has left the group")
            self._changed.notify_all()
        self.members.close()
        for link in self._links.values():
            link.leave(_head(pb.FRAME_KIND_LEAVING, self.generation))
        # All links have sent LEAVING before the first wait, so that the waits for slow peers overlap.
        begin = time.monotonic()
        for peer, link in self._links.items():
            link.wait_until_closed(max(0.0, begin + patience[peer] - time.monotonic()))
        for link in self._links.values():
            link.close()
        self._listener.close()
        for group in list(self._groups.values()):
            group.failed(self.failure)
        self._watch.join()

    def _link(self, peer: str) -> Transport | None:
        """Return the link to a peer, opening one if necessary.

        Returns:
            The link, or None once this endpoint is closed.
        """
        with self._lock:
            link = self._links.get(peer)
            if link is None and not self._closed.is_set():
                link = self._links[peer] = self._maker.make(
                    peer,
                    lost=lambda detail: self._lost(peer, f"cannot be reached ({detail})"),
                    stopped=lambda detail: self._stopped(peer, detail),
                )
                link.open(_head(pb.FRAME_KIND_HELLO, self.generation))
                if self.failure:  # an operation has just asked for the link, and has ended: its memory is not its own
                    link.give_up(_abort(self.failure, self.generation))
            return link

    def _serve(self, peer: str, receiver: Receiver) -> None:
        """Handle one of a peer's streams until it ends."""
        streams = 0  # that the peer opens; 0 = it has not said
        try:
            for frame in receiver.frames():
                if not streams:
                    streams = _streams_of(frame)
                    self._greet(peer)
                offers = frame.head.memory and self._maker.is_local(peer) and not self._peers.is_stranger(peer)
                if offers and receiver.open_offer(frame.head) and (link := self._link(peer)):
                    link.send(Outgoing(_head(pb.FRAME_KIND_MAPPED, self.generation)))
                if frame.head.kind == pb.FRAME_KIND_LEAVING:
                    self._stream_left(peer, streams)
                    return
                self._arrived(peer, frame)
        except BadFrame as error:
            self._blame(peer, error)
        else:
            self._lost(peer, "its stream broke" if receiver.broke else "its stream ended")

    def _arrived(self, peer: str, frame: Frame) -> None:
        head = frame.head
        # A peer outside all groups must not end the generation. Its data may belong to a group that is entered later.
        if head.kind != pb.FRAME_KIND_DATA and self._peers.is_stranger(peer):
            return
        if head.kind == pb.FRAME_KIND_ABORT:
            kind = BY_REASON.get(head.reason, RingError)
            detail = bytes(frame.payload[:_MAX_DETAIL]).decode(errors="replace")
            self.fail(kind(detail, rank=head.rank - 1 if head.rank else None))
        elif head.kind == pb.FRAME_KIND_MAPPED:
            if link := self._link(peer):
                link.peer_mapped(_head(pb.FRAME_KIND_MOVED, self.generation))
        elif head.kind == pb.FRAME_KIND_DATA:
            with self._lock:
                group = self._groups.get(head.group)
                if group is None:  # It may be entered later.
                    if not self._early.keep(head.group, peer, frame):
                        self.fail(_overrun(self.options.max_early_bytes, self._peers.name(peer)))
                    return
            if not group.has_member(peer):
                raise BadFrame(f"{self._peers.name(peer)} sends to the group {group.name}, in which it is not")
            group.arrived(peer, frame)

    def _greet(self, peer: str) -> None:
        """Note that the peer's stream is open, and open one back.

        With a stream in each direction, each worker notices the other's end.
        """
        with self._changed:
            self._peers.connected.add(peer)
            self._changed.notify_all()
        if not self._peers.is_stranger(peer):
            self._link(peer)

    def _stream_left(self, peer: str, streams: int) -> None:
        """Count a stream of the peer that has ended in order.

        With the last one the peer has left.
        """
        with self._lock:
            if not self._peers.stream_left(peer, streams):
                return
            groups = [group for group in self._groups.values() if group.has_member(peer)]
        for group in groups:
            group.left(peer)

    def _lost(self, peer: str, detail: str) -> None:
        """End the generation because a stream to or from the peer ended.

        Nothing happens if nobody needs the peer any more.
        """
        link = self._links.get(peer)
        if self._closed.is_set() or (peer in self._peers.left and (link is None or not link.has_unsent())):
            return
        if self._peers.is_stranger(peer):
            self._peers.left.add(peer)  # if it is in a group later, operations that wait for it fail
            return
        self.fail(PeerLost(f"{self._peers.name(peer)} is lost: {detail}", rank=self._peers.ranks.get(peer)))

    def _stopped(self, peer: str, detail: str) -> None:
        """End the generation because the peer's pulse has stopped.

        Frames that are on their way to the peer will not arrive.
        """
        self._lost(peer, f"it does not answer ({detail})")
        with self._lock:
            link = self._links.get(peer)
        if link is not None:
            link.cut()

    def _blame(self, peer: str, error: BadFrame) -> None:
        """End the generation with an error that a member caused.

        The error of a peer outside all groups ends only that peer's stream.
        """
        if self._peers.is_stranger(peer):
            self.traffic.dropped_frames += 1
            log.warning("the stream of %s, which is in no group here, was cut: %s", peer, error)
        else:
            self.fail(BadFrame(f"{self._peers.name(peer)}: {error}", rank=self._peers.ranks.get(peer)))


def _head(kind: "pb.FrameKind.ValueType", generation: int) -> pb.Head:
    return pb.Head(kind=kind, generation=generation)


def _abort(error: RingError, generation: int) -> Outgoing:
    head = _head(pb.FRAME_KIND_ABORT, generation)
    head.reason = error.reason
    head.rank = 0 if error.rank is None else error.rank + 1
    return Outgoing(head, str(error).encode()[:_MAX_DETAIL])


def _overrun(limit: int, peer: str) -> Overrun:
    return Overrun(
        f"more than max_early_bytes={limit} have come for groups that this worker has not entered; the last came from "
        f"{peer}"
    )


def _streams_of(hello: Frame) -> int:
    """Return the number of streams that a peer opens.

    The first frame of each stream tells it.

    Raises:
        BadFrame: No peer of ours opens as many.
    """
    if hello.head.streams > MAX_STREAMS:
        raise BadFrame(f"a peer opens {hello.head.streams} streams, more than {MAX_STREAMS}")
    return hello.head.streams or 1
