"""A worker's place in a generation: one port that all peers dial, and a stream to each peer that it sends to."""

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import grpc

from fedring.ring import pulse
from fedring.ring.address import advertised, dial, is_here, open_server
from fedring.ring.errors import BY_REASON, BadFrame, CollectiveTimeout, Overrun, PeerLost, RingError
from fedring.ring.frames import Frame
from fedring.ring.group import Group
from fedring.ring.guests import Guests
from fedring.ring.incoming import Incoming
from fedring.ring.link import GENERATION_KEY, METHOD, PEER_KEY, Link, Outgoing, Traffic, Wait
from fedring.ring.nearby import Offer
from fedring.ring.options import RingOptions
from fedring.ring.pulse import Pulse
from fedring.rpc.errors import REASON_KEY
from fedring.v1 import peer_pb2 as pb

log = logging.getLogger(__name__)

_MOST_DETAIL = 1000  # bytes of an error's text that are passed on
_TICK = 0.2  # seconds between looks at deadlines
_SWITCH = 0.0005  # seconds
_FLUSH = 2.0  # seconds for the last frames to a peer that may be gone
_LEAVE = 30.0  # seconds for them to a peer that was there, over a slow line; a dead one is noticed sooner


class Endpoint:
    """Listens at once; `address` is what peers dial. The first error ends it, on every rank: `failure`."""

    def __init__(self, options: RingOptions | None = None, *, generation: int = 0) -> None:
        self.options = options or RingOptions()
        self.generation = generation
        self.failure: RingError | None = None
        self.traffic = Traffic()
        # threads that move frames must not wait 5 ms, Python's default, for one that computes
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH))
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._links: dict[str, Link] = {}
        self._groups: dict[int, Group] = {}
        self._ranks: dict[str, int] = {}  # as the first group counts them, for messages
        self._homeless: list[tuple[str, Frame]] = []  # frames of groups that do not exist here yet
        self._homeless_bytes = 0
        self._here: set[str] = set()  # peers whose stream to us is open
        self._left: set[str] = set()
        self._closed = threading.Event()
        self.guests = Guests(members_only=self.options.tls_members_only)
        self._server = open_server(self.options, handler(self._exchange, self._pulse))
        self.address = advertised(self.options, self._server.port, self._server.unix_path)
        self._server.grpc.start()
        self._watch = threading.Thread(target=self._watch_deadlines, name="ring-deadlines", daemon=True)
        self._watch.start()

    def group(self, name: str, *, rank: int, members: Sequence[str]) -> Group:
        """This rank's side of a group of addresses, one of them this endpoint's; its neighbours are dialled."""
        if not self.guests.known:
            raise RingError("tls_members_only needs a rendezvous that names the members' identities")
        if members[rank] != self.address:
            raise RingError(f"rank {rank} is {members[rank]}, and this is {self.address}", rank=rank)
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
                raise RingError(f"frames could not tell the group {name!r} from {self._groups[group.id].name!r}")
            self._ranks = {peer: index for index, peer in enumerate(members)} | self._ranks
            self._groups[group.id] = group
            for peer in set(members) - {self.address}:
                self.traffic.waits.setdefault(self._ranks[peer], Wait())
            mine = [item for item in self._homeless if item[1].head.group == group.id]
            self._homeless = [item for item in self._homeless if item[1].head.group != group.id]
            self._homeless_bytes -= sum(frame.cost for _, frame in mine)
            here = self._here.intersection(members)
        for peer, frame in mine:
            if group.knows(peer):
                group.arrived(peer, frame)
        for peer in {members[(rank + 1) % len(members)], members[rank - 1], *here} - {self.address}:
            self._link(peer)
        return group

    def wait_until_matched(self, group: Group, *, timeout: float) -> None:
        """Both neighbours' streams to us are open; PeerLost names who is missing, and why if that is known."""
        wanted = {group.members[(group.rank + 1) % group.size], group.members[group.rank - 1]} - {self.address}
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None or wanted <= self._here, timeout)
            if self.failure:
                raise self.failure
            missing = min(wanted - self._here, key=group.members.index, default="")
        if missing:
            link = self._link(missing)
            why = link.obstacle() if link else ""
            rank = self._ranks[missing]
            detail = f"rank {rank} did not come within {timeout:g} s" + (f" ({why})" if why else "")
            error = PeerLost(detail, rank=rank)
            self.fail(error)
            raise error

    def send(self, peer: str, frame: Outgoing) -> None:
        """The frame goes to the peer, after those before it."""
        if peer in self._left:
            self.fail(PeerLost(f"{self._name(peer)} has left, and there is more for it", rank=self._ranks.get(peer)))
        elif link := self._link(peer):
            link.send(frame)
            if link.closed.is_set():
                self._lost(peer, "its stream has ended")

    def has_left(self, peer: str) -> bool:
        """Whether the peer has said that nothing more will come from it."""
        return peer in self._left

    def waited(self, peer: str, seconds: float) -> None:
        """An operation has waited for the peer to begin."""
        with self._lock:
            rank = self._ranks[peer]
            before = self.traffic.waits[rank]
            self.traffic.waits[rank] = Wait(before.times + 1, before.seconds + seconds)

    def exchanged(self, seconds: float) -> None:
        """An exchange of gradients has ended."""
        with self._lock:
            self.traffic.exchanges += 1
            self.traffic.exchange_seconds += seconds

    def fail(self, error: RingError) -> None:
        """The generation has ended: every operation here raises the error, and every peer is told once."""
        with self._changed:
            if self.failure or self._closed.is_set():
                return
            self.failure = error
            groups, links = list(self._groups.values()), list(self._links.values())
            self._changed.notify_all()
        log.warning("generation %d has failed: %s", self.generation, error)
        for link in links:
            link.give_up(Outgoing(self._abort_head(error), str(error).encode()[:_MOST_DETAIL]))
        for group in groups:
            group.failed(error)

    def forget(self, group: Group) -> None:
        """The group is no more."""
        with self._lock:
            self._groups.pop(group.id, None)

    def close(self) -> None:
        """Nothing of this endpoint is left; peers know that it left in order. Never hangs."""
        with self._changed:
            if self._closed.is_set():
                return
            self._closed.set()
            # a peer that is there takes its last frames; nothing is worth a wait after a failure
            patience = {peer: _FLUSH if self.failure or peer not in self._here else _LEAVE for peer in self._links}
            self.failure = self.failure or RingError("this worker has left the group")
            self._changed.notify_all()
        self.guests.close()
        for link in self._links.values():
            link.leave(self._head(pb.FRAME_KIND_LEAVING))
        begin = time.monotonic()
        for peer, link in self._links.items():
            link.closed.wait(max(0.0, begin + patience[peer] - time.monotonic()))
        for link in self._links.values():
            link.close()
        self._server.close()
        for group in list(self._groups.values()):
            group.failed(self.failure)
        self._watch.join()

    def _link(self, peer: str) -> Link | None:
        """The stream to a peer; None once this endpoint is closed."""
        with self._lock:
            link = self._links.get(peer)
            if link is None and not self._closed.is_set():
                name = self.guests.name_of(peer)
                channel = dial(peer, self.options, name=name)
                hello = self._head(pb.FRAME_KIND_HELLO)
                offer = Offer(hello) if self._shares_memory(peer) else None
                link = Link(
                    channel,
                    hello,
                    me=self.address,
                    traffic=self.traffic,
                    ended=lambda detail: self._lost(peer, f"cannot be reached ({detail})"),
                )
                link.pulse = Pulse(
                    dial(peer, self.options, pulse=True, name=name), ended=lambda detail: self._stopped(peer, detail)
                )
                link.checksum = self.options.frame_checksum
                link.offered = offer
                self._links[peer] = link
            return link

    def _exchange(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        """Serve one peer's stream to us."""
        metadata = dict(context.invocation_metadata())
        peer = str(metadata.get(PEER_KEY, ""))
        if metadata.get(GENERATION_KEY) != str(self.generation) or not peer:
            self.traffic.dropped_frames += 1
            context.set_trailing_metadata(((REASON_KEY, "stale_generation"),))
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"this is generation {self.generation}")
        if not self.guests.admits(peer, context):
            self._turn_away(peer, context)
        incoming = self._incoming(peer)
        if not context.add_callback(incoming.end):
            incoming.end()
        detail = "its stream ended"
        try:
            for place, frame in enumerate(incoming.frames(messages)):
                if place == 0:
                    self._greet(peer)
                if frame.head.kind == pb.FRAME_KIND_LEAVING:
                    self._peer_left(peer)
                    return b""
                self._arrived(peer, frame)
        except BadFrame as error:
            self._blame(peer, error)
            return b""
        except grpc.RpcError:  # it says no more
            detail = "its stream broke"
        finally:
            incoming.close()
        self._lost(peer, detail)
        return b""

    def _pulse(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        if not self.guests.admits("", context):
            self._turn_away("a pulse", context)
        return pulse.hold(request, context)

    def _turn_away(self, peer: str, context: grpc.ServicerContext) -> NoReturn:
        """The call has ended: its certificate is no member's, and nothing of it was read."""
        self.traffic.refused_streams += 1
        log.warning("%s, from %s, was refused: it is no member of the group", peer, context.peer())
        context.set_trailing_metadata(((REASON_KEY, "not_a_member"),))
        context.abort(grpc.StatusCode.PERMISSION_DENIED, "this certificate is no member's")

    def _incoming(self, peer: str) -> Incoming:
        def accept() -> bool:
            return self._shares_memory(peer) and not self._is_stranger(peer)

        def accepted() -> None:
            if link := self._link(peer):
                link.send(Outgoing(self._head(pb.FRAME_KIND_MAPPED), b""))

        return Incoming(
            generation=self.generation,
            checksum=self.options.frame_checksum,
            traffic=self.traffic,
            accept=accept,
            accepted=accepted,
        )

    def _shares_memory(self, peer: str) -> bool:
        return self.options.shared_memory and not self.options.frame_checksum and is_here(peer)

    def _arrived(self, peer: str, frame: Frame) -> None:
        head = frame.head
        if self._is_stranger(peer) and head.kind != pb.FRAME_KIND_DATA:
            return
        if head.kind == pb.FRAME_KIND_ABORT:
            kind = BY_REASON.get(head.reason, RingError)
            detail = bytes(frame.payload[:_MOST_DETAIL]).decode(errors="replace")
            self.fail(kind(detail, rank=head.rank - 1 if head.rank else None))
        elif head.kind == pb.FRAME_KIND_MAPPED:
            if link := self._link(peer):
                link.share(self._head(pb.FRAME_KIND_MOVED))
        elif head.kind == pb.FRAME_KIND_DATA:
            with self._lock:
                group = self._groups.get(head.group)
                if group is None:
                    self._keep(peer, frame)
                    return
            if not group.knows(peer):
                raise BadFrame(f"{self._name(peer)} sends to the group {group.name}, in which it is not")
            group.arrived(peer, frame)

    def _keep(self, peer: str, frame: Frame) -> None:
        """The group may come to exist. The lock is held."""
        self._homeless.append((peer, frame))
        self._homeless_bytes += frame.cost
        if self._homeless_bytes > self.options.max_early_bytes:
            self.fail(Overrun(f"{self._name(peer)} sends too much to a group that does not exist here"))

    def _greet(self, peer: str) -> None:
        """The peer's stream to us is open: ours to it is opened, too, so that each hears of the other's end."""
        with self._changed:
            self._here.add(peer)
            self._changed.notify_all()
        if not self._is_stranger(peer):
            self._link(peer)

    def _peer_left(self, peer: str) -> None:
        with self._lock:
            self._left.add(peer)
            groups = [group for group in self._groups.values() if group.knows(peer)]
        for group in groups:
            group.left(peer)

    def _lost(self, peer: str, detail: str) -> None:
        """The stream from or to a peer is no more: the generation has ended, unless nobody needs it any more."""
        link = self._links.get(peer)
        if self._closed.is_set() or (peer in self._left and (link is None or not link.pending())):
            return
        if self._is_stranger(peer):
            self._left.add(peer)  # whoever waits for it later waits in vain
            return
        self.fail(PeerLost(f"{self._name(peer)} is lost: {detail}", rank=self._ranks.get(peer)))

    def _stopped(self, peer: str, detail: str) -> None:
        """The peer's heart does not beat: what is on its way to it will not arrive."""
        self._lost(peer, f"it does not answer ({detail})")
        with self._lock:
            link = self._links.get(peer)
        if link is not None:
            link.cut()

    def _blame(self, peer: str, error: BadFrame) -> None:
        """The generation has ended with a member's fault; a stranger loses but its stream."""
        if self._is_stranger(peer):
            self.traffic.dropped_frames += 1
            log.warning("the stream of %s, which is in no group here, was cut: %s", peer, error)
        else:
            self.fail(BadFrame(f"{self._name(peer)}: {error}", rank=self._ranks.get(peer)))

    def _is_stranger(self, peer: str) -> bool:
        """Whether the peer is in no group; until there is one, every peer of the generation is believed."""
        return bool(self._ranks) and peer not in self._ranks

    def _name(self, peer: str) -> str:
        return f"rank {self._ranks[peer]}" if peer in self._ranks else peer

    def _head(self, kind: "pb.FrameKind.ValueType") -> pb.Head:
        return pb.Head(kind=kind, generation=self.generation)

    def _abort_head(self, error: RingError) -> pb.Head:
        head = self._head(pb.FRAME_KIND_ABORT)
        head.reason = error.reason
        head.rank = 0 if error.rank is None else error.rank + 1
        return head

    def _watch_deadlines(self) -> None:
        while not self._closed.wait(_TICK):
            now = time.monotonic()
            with self._lock:
                groups = list(self._groups.values())
            for group in groups:
                if operation := group.overdue(now):
                    rank = operation.waiting_for
                    who = f"rank {rank} sent nothing" if rank is not None else "peers took nothing"
                    limit = f"within the timeout of {operation.timeout:g} s"
                    self.fail(CollectiveTimeout(f"{who} for {operation.what} {limit}", rank=rank))


def handler(
    exchange: Callable[[Iterator[bytes], grpc.ServicerContext], bytes],
    hold: Callable[[bytes, grpc.ServicerContext], bytes] = pulse.hold,
) -> grpc.GenericRpcHandler:
    """What a worker serves: `exchange`, and the pulse."""
    _, service, method = METHOD.split("/")
    methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        method: grpc.stream_unary_rpc_method_handler(exchange),
        pulse.METHOD.rpartition("/")[2]: grpc.unary_unary_rpc_method_handler(hold),
    }
    return grpc.method_handlers_generic_handler(service, methods)
