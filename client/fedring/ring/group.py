"""Ranks that run collectives together: which operation a frame belongs to, and which peer is which rank."""

import itertools
import threading
import time
import zlib
from collections.abc import Sequence
from typing import Protocol

from fedring.ring.causal import MAX_KEY, next_key
from fedring.ring.errors import Overrun, RingError
from fedring.ring.frames import Frame
from fedring.ring.link import Outgoing
from fedring.ring.operation import Operation
from fedring.ring.program import Program, Send
from fedring.v1 import peer_pb2 as pb

_GRADIENTS = ("allreduce ", "allgather of at most ")  # what such operations are called


class Streams(Protocol):
    """What a group needs from the worker's endpoint."""

    failure: RingError | None

    def send(self, peer: str, frame: Outgoing) -> None:
        """The frame goes to the peer, after those before it."""

    def fail(self, error: RingError) -> None:
        """End the generation."""

    def has_left(self, peer: str) -> bool:
        """Whether the peer has said that nothing more will come from it."""
        ...

    def waited(self, peer: str, seconds: float) -> None:
        """An operation has waited for the peer to begin."""

    def exchanged(self, seconds: float) -> None:
        """An exchange of gradients has ended."""


class Group:
    """This rank's side of a group; `members[r]` is the address of rank r."""

    def __init__(
        self, streams: Streams, name: str, *, rank: int, members: Sequence[str], generation: int, max_early_bytes: int
    ) -> None:
        self.name, self.rank, self.size = name, rank, len(members)
        self.members = list(members)
        self.id = group_id(name)
        self._streams = streams
        self._ranks = {peer: index for index, peer in enumerate(members)}
        self._generation = generation
        self._max_early = max_early_bytes
        self._lock = threading.Lock()
        self._running: dict[str, Operation] = {}
        self._early: dict[str, list[tuple[int, Frame]]] = {}  # frames of operations that have not begun here
        self._early_bytes = 0
        self._roots = itertools.count()
        self._arrival = threading.Condition(self._lock)

    def start(self, what: str, program: Program, *, timeout: float, key: str = "") -> Operation:
        """`program` runs under the next key, or under `key`; `what` must be equal on all ranks."""
        key = key or next_key(self._next_root)
        if len(key) > MAX_KEY:
            raise RingError(f"the key {key!r} is longer than a frame's head can carry")
        operation = Operation(self, key, what, program, timeout=timeout)
        with self._lock:
            self._running[key] = operation
            early = self._early.pop(key, [])
            self._early_bytes -= sum(frame.cost for _, frame in early)
        if self._streams.failure:  # after the entry, so that a failure from now on finds it
            operation.fail(self._streams.failure)
        else:
            operation.begin(early)
        return operation

    def arrived(self, peer: str, frame: Frame) -> None:
        """The operation has the frame, or will have it when it begins."""
        source, key = self._ranks[peer], frame.head.key
        with self._lock:
            operation = self._running.get(key)
            if operation is None:
                self._early.setdefault(key, []).append((source, frame))
                self._early_bytes += frame.cost
                self._arrival.notify_all()
                if self._early_bytes <= self._max_early:
                    return
        if operation is None:
            self._streams.fail(
                Overrun(
                    f"more than {self._max_early} bytes have come for operations that rank {self.rank} has not begun"
                )
            )
            return
        operation.arrived(source, frame)

    def wait_for_any(self, keys: dict[str, int], timeout: float) -> str:
        """The first of these keys, by the rank that sends it, for which something has come; empty = none came."""

        def found() -> str:
            if self._streams.failure or all(map(self.has_left, keys.values())):
                return next(iter(keys))  # the operation that is started next raises why
            return next((key for key in keys if key in self._early), "")

        with self._lock:
            self._arrival.wait_for(lambda: bool(found()), timeout)
            return found()

    def knows(self, peer: str) -> bool:
        """Whether the peer is a rank of this group."""
        return peer in self._ranks

    def send(self, operation: Operation, send: Send) -> None:
        """Put an operation's bytes on their way."""
        head = pb.Head(
            kind=pb.FRAME_KIND_DATA,
            group=self.id,
            generation=self._generation,
            key=operation.key,
            signature=operation.signature,
            tag=send.tag,
            part=send.part,
        )
        self._streams.send(self.members[send.to], Outgoing(head, send.data, operation.sent))

    def ended(self, operation: Operation) -> None:
        """Forget an operation."""
        with self._lock:
            self._running.pop(operation.key, None)
        if operation.error is None and operation.what.startswith(_GRADIENTS):
            self._streams.exchanged(time.monotonic() - operation.began)

    def waited(self, rank: int, seconds: float) -> None:
        """An operation has waited for the rank to begin."""
        self._streams.waited(self.members[rank], seconds)

    def fail(self, error: RingError) -> None:
        """End the generation."""
        self._streams.fail(error)

    def failed(self, error: RingError) -> None:
        """Every running operation has ended with the error."""
        for operation in self._operations():
            operation.fail(error)
        with self._lock:
            self._arrival.notify_all()

    def left(self, peer: str) -> None:
        """Operations that wait for a rank which has left wait in vain."""
        for operation in self._operations():
            operation.left(self._ranks[peer])
        with self._lock:
            self._arrival.notify_all()

    def has_left(self, rank: int) -> bool:
        """Whether nothing will come from the rank any more."""
        return self._streams.has_left(self.members[rank])

    def overdue(self, now: float) -> Operation | None:
        """An operation whose time is up."""
        return next((operation for operation in self._operations() if operation.is_overdue(now)), None)

    def _operations(self) -> list[Operation]:
        with self._lock:
            return list(self._running.values())

    def _next_root(self) -> int:
        return next(self._roots)


def group_id(name: str) -> int:
    """What stands for a group's name in frames."""
    return zlib.crc32(name.encode())
