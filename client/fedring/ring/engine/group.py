"""Groups of ranks that run collectives together.

A group finds the operation of each frame, and the rank of each peer.
"""

import itertools
import threading
import time
import zlib
from collections.abc import Callable, Collection, Sequence
from typing import Generic, Protocol, TypeVar

from fedring.ring.engine.home import Home
from fedring.ring.engine.operation import MAX_KEY, Kind, Operation, next_key
from fedring.ring.engine.program import Program, Send
from fedring.ring.engine.receipt import Receipt
from fedring.ring.errors import Overrun, RingError
from fedring.ring.transport.frames import Bytes, Frame, fitting_what
from fedring.ring.transport.interface import Outgoing
from fedring.v1 import peer_pb2 as pb

Key = TypeVar("Key")
Sender = TypeVar("Sender")


class EarlyFrames(Generic[Key, Sender]):
    """Frames of operations or groups that do not exist yet.

    Each is kept with its sender, by the key that will ask for it. There is no lock.

    Args:
        limit: The most bytes that they may take together.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._frames: dict[Key, list[tuple[Sender, Frame]]] = {}
        self._bytes = 0

    def __contains__(self, key: Key) -> bool:
        return key in self._frames

    def keep(self, key: Key, sender: Sender, frame: Frame) -> bool:
        """Keep a frame, unless all frames together would exceed the limit.

        Returns whether it is kept.
        """
        if self._bytes + frame.cost > self._limit:
            return False
        self._frames.setdefault(key, []).append((sender, frame))
        self._bytes += frame.cost
        return True

    def first_from(self, sender: Sender) -> Frame | None:
        """Return the first unclaimed frame of a sender, if any."""
        came = itertools.chain.from_iterable(self._frames.values())
        return next((frame for one, frame in came if one == sender), None)

    def take(self, key: Key) -> list[tuple[Sender, Frame]]:
        """Remove and return the frames of a key, in order of arrival."""
        if key not in self._frames:
            return []
        frames = self._frames.pop(key)
        self._bytes -= sum(frame.cost for _, frame in frames)
        return frames


class Operations:
    """A group's running operations, and frames that came before theirs.

    All methods may be called from any thread.

    Args:
        early: Keeps the frames, by the operation's key, from a rank.
    """

    def __init__(self, early: EarlyFrames[str, int]) -> None:
        self._early = early
        self._running: dict[str, Operation | Receipt] = {}
        self._lock = threading.Lock()
        self._arrival = threading.Condition(self._lock)

    def add(self, operation: Operation | Receipt) -> list[tuple[int, Frame]]:
        """Let frames find an operation, and return those that came before."""
        with self._lock:
            self._running[operation.key] = operation
            return self._early.take(operation.key)

    def remove(self, operation: Operation | Receipt) -> None:
        """Forget an operation."""
        with self._lock:
            self._running.pop(operation.key, None)

    def running(self) -> list[Operation | Receipt]:
        """Return those that run now."""
        with self._lock:
            return list(self._running.values())

    def arrived(self, source: int, frame: Frame) -> bool:
        """Give a rank's frame to its operation, which may start later.

        Returns:
            Whether the frames that wait for their operations are within the limit.
        """
        key = frame.head.key
        with self._lock:
            operation = self._running.get(key)
            if operation is None:
                fits = self._early.keep(key, source, frame)
                self._arrival.notify_all()
                return fits
        # Outside the lock: the operation may run its program, and end.
        operation.arrived(source, frame)
        return True

    def wait_for_any(self, keys: Collection[str], timeout: float, *, over: Callable[[], bool]) -> str:
        """Wait for the first frame of an operation not yet started.

        Args:
            keys: The keys of the operations.
            timeout: Seconds to wait.
            over: Tells whether none will come any more. What changes that calls `wake` afterwards.

        Returns:
            The first key for which a frame has come, or "" if none has come in time, or the first key if none will.
        """

        def found() -> str:
            # Asked first: a rank that has left may have sent its message before.
            if came := next((key for key in keys if key in self._early), ""):
                return came
            return next(iter(keys)) if over() else ""

        with self._lock:
            self._arrival.wait_for(lambda: bool(found()), timeout)
            return found()

    def wake(self) -> None:
        """Have those who wait look again whether any frame will come."""
        with self._lock:
            self._arrival.notify_all()

    def overdue(self, now: float) -> Operation | Receipt | None:
        """Return an operation whose time is up, if there is one."""
        return next((operation for operation in self.running() if operation.is_overdue(now)), None)

    def sent_instead(self, rank: int) -> str:
        """Return the operation that the rank runs ahead of this one.

        Returns:
            The description of the first operation that has not started here and for which the rank has sent a frame,
            or "" if there is none.
        """
        with self._lock:
            frame = self._early.first_from(rank)
        return (frame.what or "another operation") if frame else ""


class Links(Protocol):
    """The part of a worker's endpoint that a group uses."""

    failure: RingError | None
    home: Home

    def send(self, peer: str, frame: Outgoing) -> None:
        """Send a frame to the peer, after those before it."""

    def send_at_once(self, peer: str, frame: Outgoing) -> bool:
        """Send a frame, if that needs no wait.

        Returns whether it is sent.
        """
        ...

    def fail(self, error: RingError) -> None:
        """End the generation."""

    def has_left(self, peer: str) -> bool:
        """Return whether the peer has left in order.

        Then no more frames come from it.
        """
        ...

    def waited(self, peer: str, seconds: float) -> None:
        """Count a wait of an operation for the peer to begin."""

    def exchanged(self, seconds: float) -> None:
        """Count an exchange of gradients that has ended."""


class Group:
    """One rank's side of a group.

    Args:
        links: The worker's links to its peers.
        name: The group's name, equal on all ranks.
        rank: This worker's rank in the group.
        members: The addresses of all ranks; `members[rank]` is this worker's.
        generation: The generation that all frames carry.
        max_early_bytes: The most bytes that are kept for operations that have not started here; an attribute, too.

    Attributes:
        operations: Those that run here.
    """

    def __init__(
        self, links: Links, name: str, *, rank: int, members: Sequence[str], generation: int, max_early_bytes: int
    ) -> None:
        self.name, self.rank, self.size = name, rank, len(members)
        self.members = list(members)
        self.id = group_id(name)
        self.home = links.home
        self._links = links
        self._ranks = {peer: index for index, peer in enumerate(members)}
        self._generation = generation
        self.max_early_bytes = max_early_bytes
        self.operations = Operations(EarlyFrames(max_early_bytes))
        self._counter = itertools.count()
        self._closed = False

    def start(
        self,
        what: str,
        program: Program,
        *,
        kind: Kind = Kind.OTHER,
        timeout: float,
        key: str = "",
        ending: Callable[[], None] | None = None,
    ) -> Operation:
        """Start an operation.

        Args:
            what: The operation's description, with dtype and lengths; equal on all ranks.
            program: This rank's program.
            kind: The operation's purpose.
            timeout: Seconds that it may take.
            key: Names the operation, equal on all ranks; "" = the next one in the order in which this rank starts them.
            ending: See `Operation`.

        Raises:
            RingError: The key is longer than MAX_KEY, or this worker has left the group.
            Forked: This process is a fork of the worker.
        """
        self._check_open()
        key = key or next_key(self._counter)
        if len(key) > MAX_KEY:
            raise RingError(f"the key {key!r} has {len(key)} characters; a frame's head has room for {MAX_KEY}")
        operation = Operation(self, key, what, program, kind=kind, timeout=timeout, ending=ending)
        early = self._register(operation)
        if not operation.done:
            operation.begin(early)
        return operation

    def send_at_once(self, what: str, data: Bytes, *, to: int, key: str) -> bool:
        """Send a message of one frame, if that needs no wait.

        It costs a fraction of an operation. The receiver cannot tell them apart.

        Args:
            what: The message's description, equal on both ranks.
            data: Its bytes, not more than fit into a frame.
            to: The rank that it goes to.
            key: Names it, equal on both ranks.

        Returns:
            Whether it is sent. If not, an operation must send it, which may also find out why it cannot.
        """
        if self._closed or self._links.failure:
            return False
        head = self._head(what, key, zlib.crc32(what.encode()))
        return self._links.send_at_once(self.members[to], Outgoing(head, data))

    def receive(self, what: str, *, source: int, size: int, key: str, timeout: float) -> memoryview:
        """Wait for a message of one frame, and return its bytes.

        Args:
            what: The message's description, equal on both ranks.
            source: The rank that sends it.
            size: Its bytes.
            key: Names it, equal on both ranks.
            timeout: Seconds to wait.

        Raises:
            RingError: The error that ended the generation, or this worker has left the group.
            Forked: This process is a fork of the worker.
        """
        self._check_open()
        signature = zlib.crc32(what.encode())
        receipt = Receipt(self, what, signature=signature, source=source, size=size, key=key, timeout=timeout)
        return receipt.wait(self._register(receipt))

    def arrived(self, peer: str, frame: Frame) -> None:
        """Give a frame to its operation, which may start later."""
        if not self.operations.arrived(self._ranks[peer], frame):
            self._links.fail(
                Overrun(
                    f"more than max_early_bytes={self.max_early_bytes} have come for operations that rank {self.rank} "
                    f"has not started; the other ranks are too far ahead of it"
                )
            )

    def wait_for_any(self, keys: dict[str, int], timeout: float) -> str:
        """Wait for the first frame of an operation not yet started here.

        Args:
            keys: The keys of the operations, each with the rank that sends it.
            timeout: Seconds to wait.

        Returns:
            The first key for which a frame has come, or "" if none has come in time. If none has come, and none will
            after a failure or since all of the ranks have left, the first key: the operation that is started with it
            raises the reason.

        Raises:
            Forked: This process is a fork of the worker.
        """
        self.home.check()
        return self.operations.wait_for_any(
            keys,
            timeout,
            over=lambda: self._closed or self._links.failure is not None or all(map(self.has_left, keys.values())),
        )

    def has_member(self, peer: str) -> bool:
        """Return whether the peer is a rank of this group."""
        return peer in self._ranks

    def send(self, operation: Operation, send: Send) -> None:
        """Send an operation's bytes to a rank."""
        head = self._head(operation.what, operation.key, operation.signature, tag=send.tag, part=send.part)
        if send.total:
            head.total = send.total
        self._links.send(self.members[send.to], Outgoing(head, send.data, operation.sent))

    def ended(self, operation: Operation) -> None:
        """Forget an operation, and count it if it has exchanged gradients."""
        self.operations.remove(operation)
        if operation.error is None and operation.kind is Kind.GRADIENTS:
            self._links.exchanged(time.monotonic() - operation.began)

    def taken(self, receipt: Receipt) -> None:
        """Forget a receipt."""
        self.operations.remove(receipt)

    def waited(self, rank: int, seconds: float) -> None:
        """Count a wait of an operation for the rank to begin."""
        self._links.waited(self.members[rank], seconds)

    def fail(self, error: RingError) -> None:
        """End the generation."""
        self._links.fail(error)

    def failed(self, error: RingError) -> None:
        """End every running operation with the error, since the generation has ended."""
        for operation in self.operations.running():
            operation.fail(error)
        self.operations.wake()

    def close(self) -> None:
        """Leave the group: refuse new operations, and end running ones."""
        self._closed = True
        for operation in self.operations.running():
            operation.abandon(self._has_left())
        self.operations.wake()

    def left(self, peer: str) -> None:
        """Tell every running operation that nothing more comes from the peer."""
        for operation in self.operations.running():
            operation.left(self._ranks[peer])
        self.operations.wake()

    def has_left(self, rank: int) -> bool:
        """Return whether nothing more will come from the rank."""
        return self._links.has_left(self.members[rank])

    def _head(self, what: str, key: str, signature: int, *, tag: int = 0, part: int = 0) -> pb.Head:
        """Return the head of a frame of an operation."""
        return pb.Head(
            kind=pb.FRAME_KIND_DATA,
            group=self.id,
            generation=self._generation,
            key=key,
            signature=signature,
            tag=tag,
            part=part,
            what=fitting_what(what, key) if part == 0 else "",
        )

    def _check_open(self) -> None:
        self.home.check()
        if self._closed:
            raise self._has_left()

    def _register(self, operation: Operation | Receipt) -> list[tuple[int, Frame]]:
        """Let frames find an operation, and return those that came before.

        It is asked afterwards whether the group has failed or was left, so that whatever happens from now on finds it.
        """
        early = self.operations.add(operation)
        if self._links.failure:
            operation.fail(self._links.failure)
        elif self._closed:  # by another thread, since it was asked
            operation.abandon(self._has_left())
        return early

    def _has_left(self) -> RingError:
        return RingError(f"this worker has left the group {self.name!r}: no collective of it can run any more")


def group_id(name: str) -> int:
    """Return the number that stands for a group's name in frames."""
    return zlib.crc32(name.encode())
