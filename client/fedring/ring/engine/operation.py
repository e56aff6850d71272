"""Running collectives: kind, key, and the lock and clock around a program."""

import hashlib
import itertools
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from typing import Protocol

from fedring.ring.engine.home import Home
from fedring.ring.engine.program import Program, Receive, Send, Stepper
from fedring.ring.errors import PeerLost, RingError
from fedring.ring.transport.frames import Frame

MAX_KEY = 64  # characters, which a frame's head can carry
GRACE_SECONDS = 1.0
"""How much later an operation is overdue if it waits for a rank that may itself wait for another."""

_MAX_PATH = 44  # characters of a key's path

_local = threading.local()


class Kind(Enum):
    """The purpose of an operation, for a worker's counters."""

    GRADIENTS = auto()  # an exchange of gradients: an all-reduce, or an allgather of compressed gradients
    OTHER = auto()


class CallbackScope:
    """Names the operations that the callback of a future starts.

    Ranks must call one operation by one name. To count calls works as long as every rank makes them in one order, and
    callbacks of futures do not: a hook such as PowerSGD starts the next collective in the callback of the one before,
    and which bucket's callback runs first differs between ranks. So an operation that a callback starts is named by
    what caused it: the operation whose callback it is, the callback's place, and the operation's place in the callback.
    """

    def __init__(self, path: str) -> None:
        # A long chain of callbacks has a long path, and frames have little room. The hash of the path names it as well.
        self._path = path if len(path) <= _MAX_PATH else hashlib.sha256(path.encode()).hexdigest()[:32]
        self._operations = itertools.count()
        self._callbacks = itertools.count()

    def next_operation(self) -> str:
        """Return the key of the next operation that the callback starts."""
        return f"{self._path}.{next(self._operations)}"

    def next_callback(self) -> "CallbackScope":
        """Return the scope of the next callback on the same future."""
        return CallbackScope(f"{self._path}/{next(self._callbacks)}")


@contextmanager
def inside(scope: CallbackScope) -> Iterator[None]:
    """Have `scope` name the operations that this thread starts in the block."""
    outer = getattr(_local, "scope", None)
    _local.scope = scope
    try:
        yield
    finally:
        _local.scope = outer


def next_key(count: Iterator[int]) -> str:
    """Return the key of an operation that starts on this thread.

    Outside of callbacks, it is the next number of `count`.
    """
    scope: CallbackScope | None = getattr(_local, "scope", None)
    return scope.next_operation() if scope else str(next(count))


class Carrier(Protocol):
    """The part of a group that an operation uses."""

    rank: int
    home: Home

    def send(self, operation: "Operation", send: Send) -> None:
        """Send the bytes; call `operation.sent()` once they are copied."""

    def ended(self, operation: "Operation") -> None:
        """Forget the operation."""

    def waited(self, rank: int, seconds: float) -> None:
        """Count a wait for the rank to begin."""

    def fail(self, error: RingError) -> None:
        """End the generation."""

    def has_left(self, rank: int) -> bool:
        """Return whether nothing more will come from the rank."""
        ...


class Operation:
    """A collective that runs on the threads that deliver its frames.

    Args:
        carrier: Sends the program's data, and is told of the end.
        key: Names the operation, equal on all ranks.
        what: What the operation is, with dtype and lengths, equal on all ranks. Its CRC-32 is sent in every frame, so
            the text is part of the protocol.
        program: This rank's program.
        kind: The operation's purpose.
        timeout: Seconds that it may take.
        ending: Called once at the end, before anybody learns of it, under a lock; None = nothing.
    """

    def __init__(
        self,
        carrier: Carrier,
        key: str,
        what: str,
        program: Program,
        *,
        kind: Kind = Kind.OTHER,
        timeout: float,
        ending: Callable[[], None] | None = None,
    ) -> None:
        self.key, self.what, self.kind = key, what, kind
        self.signature = zlib.crc32(what.encode())
        self.timeout = timeout
        self.began = time.monotonic()
        self.deadline = self.began + timeout
        self.error: RingError | None = None
        self._carrier = carrier
        self._lock = threading.Lock()
        self._stepper = Stepper(program, what=what, key=key, rank=carrier.rank, signature=self.signature)
        self._idle_since = 0.0  # when it began to wait for a rank that may not have begun; 0 = it does not
        self._count = threading.Lock()
        self._unsent = 1  # the program itself counts as one, until it ends
        self._abandoned: RingError | None = None
        self._has_ended = False
        self._running = threading.Lock()  # held until the end: it wakes those who wait at a third of an Event's cost
        self._running.acquire()
        self._callbacks: list[Callable[[], None]] = []
        self._ending = ending

    @property
    def done(self) -> bool:
        """Whether it has ended, with or without an error."""
        return self._has_ended

    @property
    def waiting_for(self) -> int | None:
        """The rank that it waits for."""
        waiting = self._stepper.waiting
        return waiting.source if waiting else None

    def without_frames(self, ranks: Iterable[int]) -> list[int]:
        """Return those of `ranks` that have sent no unread frame."""
        with self._lock:
            return self._stepper.without_frames(ranks)

    def is_overdue(self, now: float) -> bool:
        """Return whether the operation's time is up.

        It has GRACE_SECONDS more while it waits for a rank that may itself wait for others.
        """
        waiting = self._stepper.waiting
        return now > self.deadline + (GRACE_SECONDS if waiting is not None and not waiting.is_first else 0.0)

    def begin(self, early: Sequence[tuple[int, Frame]] = ()) -> None:
        """Start the program, with the frames that came before.

        Args:
            early: The frames, each with its source.
        """
        self._run(early, begins=True)

    def arrived(self, source: int, frame: Frame) -> None:
        """Give a frame to the program, and run it further."""
        self._run([(source, frame)])

    def left(self, rank: int) -> None:
        """Fail the generation if the program waits for a rank that left."""
        with self._lock:
            waits = self._stepper.waiting is not None and self._stepper.waiting.source == rank and not self.done
        if waits:
            self._carrier.fail(self._lost(rank))

    def sent(self) -> None:
        """Count a copied send, or the end of the program."""
        with self._count:
            self._unsent -= 1
            last = self._unsent == 0
        if last:
            self._end(self._abandoned)

    def fail(self, error: RingError) -> None:
        """End the operation with an error, unless it has ended.

        A step that is under way still uses the tensors' memory.
        """
        self._end(error)

    def stop(self, error: RingError) -> None:
        """End the operation with an error, and wait for its current step.

        An operation that has ended keeps its result.
        """
        self._end(error)
        with self._lock:
            self._stepper.close()

    def abandon(self, error: RingError) -> None:
        """End the operation with an error once its sends are copied.

        Nothing happens if its program has ended.
        """
        with self._lock:
            if self._stepper.ended:
                return
            self._stepper.close()
            self._abandoned = error
        self.sent()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end, at most `timeout` seconds.

        Returns:
            Whether the operation has ended.

        Raises:
            RingError: A copy of the error that it ended with.
            Forked: This process is a fork of the worker.
        """
        self._carrier.home.check()
        if not self._has_ended and self._running.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
            self._running.release()  # for others who wait
        if not self._has_ended:
            return False
        if self.error:
            self.stop(self.error)
            raise type(self.error)(str(self.error), rank=self.error.rank) from self.error
        return True

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, when the operation has ended.

        It is called on the thread that brings the end, and must not wait.
        """
        with self._count:
            if not self._has_ended:
                self._callbacks.append(callback)
                return
        callback()

    def _run(self, frames: Sequence[tuple[int, Frame]], *, begins: bool = False) -> None:
        """Give frames to the program, and run it further.

        An error ends the generation, which is done without the lock.
        """
        with self._lock:
            error = self._keep_and_advance(frames, begins=begins)
        if error:
            self._carrier.fail(error)

    def _keep_and_advance(self, frames: Sequence[tuple[int, Frame]], *, begins: bool) -> RingError | None:
        try:
            for source, frame in frames:
                self._stepper.keep(source, frame)
            if begins or self._stepper.has_what_it_waits_for:
                self._advance()
        except RingError as error:
            return error
        except Exception as error:  # noqa: BLE001  # nobody else would notice: this is one of gRPC's threads
            return RingError(f"{self.what} failed: {error!r}")
        return None

    def _advance(self) -> None:
        """Run the program until it waits or ends.

        The caller holds the lock.
        """
        stepper = self._stepper
        while not self._has_ended:  # its end may be a failure, after which the tensors are the caller's again
            if (waiting := stepper.waiting) is not None:
                if not stepper.has_what_it_waits_for:
                    self._begin_to_wait(waiting)
                    return
                if self._idle_since:
                    self._carrier.waited(waiting.source, time.monotonic() - self._idle_since)
                    self._idle_since = 0.0
            send = stepper.step()
            if stepper.ended:
                self.sent()
                return
            if send is not None:
                with self._count:
                    self._unsent += 1
                self._carrier.send(self, send)

    def _begin_to_wait(self, waiting: Receive) -> None:
        if waiting.is_first:
            self._idle_since = time.monotonic()
        if self._carrier.has_left(waiting.source):
            raise self._lost(waiting.source)

    def _lost(self, rank: int) -> PeerLost:
        return PeerLost(f"rank {rank} has left, and {self.what} waits for it", rank=rank)

    def _end(self, error: RingError | None) -> None:
        with self._count:
            if self._has_ended:
                return
            self.error = error
            if self._ending is not None:
                self._ending()
            self._has_ended = True
            self._running.release()
            callbacks, self._callbacks = self._callbacks, []
        self._carrier.ended(self)
        for callback in callbacks:
            callback()
