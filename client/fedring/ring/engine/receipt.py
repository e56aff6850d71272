"""The receipt of a message of one frame, by a waiting thread.

It stands among a group's operations until the frame has come, and costs a fraction of one: it has no program, and the
thread that waits reads the payload where it is. A message that has come before it is asked for needs no place there.
"""

import threading
import time
from collections.abc import Iterable
from typing import Protocol

from fedring.ring.engine.home import Home
from fedring.ring.engine.program import other_operation, other_size, sent_twice
from fedring.ring.errors import PeerLost, RingError
from fedring.ring.transport.frames import Frame


class Taker(Protocol):
    """The part of a group that a receipt uses."""

    rank: int
    home: Home

    def taken(self, receipt: "Receipt") -> None:
        """Forget the receipt."""

    def waited(self, rank: int, seconds: float) -> None:
        """Count a wait for the rank to begin."""

    def fail(self, error: RingError) -> None:
        """End the generation."""

    def has_left(self, rank: int) -> bool:
        """Return whether nothing more will come from the rank."""
        ...


class Receipt:
    """A message of one frame that a thread receives.

    Args:
        taker: Is told of the end, and of errors.
        what: The description of the message, equal on both ranks.
        signature: The number that the frame must carry.
        source: The rank that sends it.
        size: Its bytes.
        key: Names it, equal on both ranks.
        timeout: Seconds that it may take.
    """

    def __init__(
        self, taker: Taker, what: str, *, signature: int, source: int, size: int, key: str, timeout: float
    ) -> None:
        self.key, self.what, self.timeout = key, what, timeout
        self.waiting_for: int = source
        self._taker = taker
        self._signature, self._size = signature, size
        self._deadline = time.monotonic() + timeout
        self._payload: memoryview | None = None
        self._error: RingError | None = None
        self._has_read_early = False  # before, whoever has left may have sent the message
        self._ending = threading.Lock()
        self._running = threading.Lock()  # held until the end
        self._running.acquire()

    def is_overdue(self, now: float) -> bool:
        """Return whether the time is up."""
        return now > self._deadline

    def arrived(self, source: int, frame: Frame) -> None:
        """Take the frame. One that no correct worker sends ends the generation."""
        head, payload = frame.head, frame.payload
        if head.signature != self._signature:
            self._taker.fail(other_operation(source, frame, what=self.what, key=self.key, rank=self._taker.rank))
        elif (source, head.tag, head.part) != (self.waiting_for, 0, 0):
            return  # nobody asks for it
        elif self._payload is not None:
            self._taker.fail(sent_twice(source, frame, self.what))
        elif len(payload) != self._size:
            self._taker.fail(other_size(source, len(payload), self._size, what=self.what, key=self.key))
        else:
            self._end(payload=payload)

    def left(self, rank: int) -> None:
        """Fail the generation if the message's rank has left."""
        if rank == self.waiting_for and self._has_read_early and self._payload is None:
            self._taker.fail(PeerLost(f"rank {rank} has left, and {self.what} waits for it", rank=rank))

    def fail(self, error: RingError) -> None:
        """End with an error, unless the message has come."""
        self._end(error=error)

    abandon = fail

    def wait(self, early: Iterable[tuple[int, Frame]]) -> memoryview:
        """Wait for the message, and return its bytes.

        Args:
            early: The frames that came before, each with its source.

        Raises:
            RingError: A copy of the error that it ended with.
        """
        for source, frame in early:
            self.arrived(source, frame)
        self._has_read_early = True
        if self._payload is None and self._error is None:
            began = time.monotonic()
            if self._taker.has_left(self.waiting_for):
                self.left(self.waiting_for)
            self._running.acquire()
            if self._error is None:
                self._taker.waited(self.waiting_for, time.monotonic() - began)
        if self._error is not None:
            raise type(self._error)(str(self._error), rank=self._error.rank) from self._error
        assert self._payload is not None
        return self._payload

    def _end(self, *, payload: memoryview | None = None, error: RingError | None = None) -> None:
        with self._ending:
            if self._payload is not None or self._error is not None:
                return
            self._payload, self._error = payload, error
        self._taker.taken(self)
        self._running.release()
