"""A running collective: its program, what has come for it, and who waits for its end."""

import threading
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from fedring.ring.errors import BadFrame, Mismatch, PeerLost, RingError
from fedring.ring.frames import Frame
from fedring.ring.program import Program, Receive, Send

_GRACE = 1.0  # seconds


class Carrier(Protocol):
    """What an operation needs from its group."""

    def send(self, operation: "Operation", send: Send) -> None:
        """Put the bytes on their way; `operation.sent()` follows once they are copied."""

    def ended(self, operation: "Operation") -> None:
        """Forget the operation."""

    def waited(self, rank: int, seconds: float) -> None:
        """The rank has begun; an operation had waited for that."""

    def fail(self, error: RingError) -> None:
        """End the generation."""

    def has_left(self, rank: int) -> bool:
        """Whether nothing will come from the rank any more."""
        ...


class Operation:
    """Runs its program on whatever thread brings what the program waits for."""

    def __init__(self, carrier: Carrier, key: str, what: str, program: Program, *, timeout: float) -> None:
        self.key, self.what = key, what
        self.signature = zlib.crc32(what.encode())
        self.timeout = timeout
        self.began = time.monotonic()
        self.deadline = self.began + timeout
        self.error: RingError | None = None
        self._carrier = carrier
        self._program = program
        self._lock = threading.Lock()
        self._inbox: dict[tuple[int, int, int], memoryview] = {}
        self._waiting: Receive | None = None
        self._idle_since = 0.0  # waiting for a rank that has not begun; 0 = not so
        self._count = threading.Lock()
        self._unsent = 1  # the program itself counts as one, until it ends
        self._done = threading.Event()
        self._callbacks: list[Callable[[], None]] = []

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._done.is_set()

    @property
    def waiting_for(self) -> int | None:
        """The rank that it waits for."""
        waiting = self._waiting
        return waiting.source if waiting else None

    def unheard(self, ranks: Iterable[int]) -> list[int]:
        """Those of `ranks` of which nothing lies here that the program has not taken yet."""
        with self._lock:
            heard = {source for source, _, _ in self._inbox}
        return [rank for rank in ranks if rank not in heard]

    def is_overdue(self, now: float) -> bool:
        """Whether its time is up; later if it waits for one that has begun, and so must wait for another itself."""
        waiting = self._waiting
        return now > self.deadline + (_GRACE if waiting is not None and _has_begun(waiting) else 0.0)

    def begin(self, early: Sequence[tuple[int, Frame]] = ()) -> None:
        """The program has what had come before, by source, and has run as far as it can."""
        with self._lock:
            refused = [error for source, frame in early if (error := self._keep(source, frame))]
            error = refused[0] if refused else self._advance()
        if error:
            self._carrier.fail(error)

    def arrived(self, source: int, frame: Frame) -> None:
        """The program has what came, and has run as far as it can."""
        with self._lock:
            error = self._keep(source, frame)
            waited = self._waiting
            if error is None and waited is not None and waited.place in self._inbox:
                error = self._advance()
        if error:
            self._carrier.fail(error)

    def left(self, rank: int) -> None:
        """Nothing more comes from a rank: if the program waits for it, it waits in vain."""
        with self._lock:
            in_vain = self._waiting is not None and self._waiting.source == rank and not self.done
        if in_vain:
            self._carrier.fail(_in_vain(rank, self.what))

    def sent(self) -> None:
        """One of the program's sends has been copied, or the program has ended."""
        with self._count:
            self._unsent -= 1
            last = self._unsent == 0
        if last:
            self._end(None)

    def fail(self, error: RingError) -> None:
        """It has ended, badly, unless it had ended before."""
        self._end(error)

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it has ended, well, within `timeout` seconds; raises the error that it ended with."""
        if not self._done.wait(timeout):
            return False
        if self.error:
            with self._lock:
                pass  # a step that was under way when it failed is over: nothing writes to the tensors any more
            raise type(self.error)(str(self.error), rank=self.error.rank) from self.error
        return True

    def when_done(self, callback: Callable[[], None]) -> None:
        """`callback` is called once, at the end, on the thread that brings it; it must not wait."""
        with self._count:
            if not self._done.is_set():
                self._callbacks.append(callback)
                return
        callback()

    def _keep(self, source: int, frame: Frame) -> RingError | None:
        """The program finds the frame when it asks for it. The lock is held."""
        head = frame.head
        place = (source, head.tag, head.part)
        if head.signature != self.signature:
            return Mismatch(f"rank {source} runs another operation than {self.what} (key {self.key})", rank=source)
        if place in self._inbox:
            return BadFrame(f"rank {source} sent part {head.part} of step {head.tag} of {self.what} twice", rank=source)
        self._inbox[place] = frame.payload
        return None

    def _advance(self) -> RingError | None:
        """Run the program until it waits or ends. The lock is held."""
        answer = None
        try:
            while not self.done:  # its end may be a failure, after which the tensors are the caller's again
                if (waited := self._waiting) is not None:
                    answer = self._inbox.pop(waited.place, None)
                    if answer is None:
                        if not _has_begun(waited):
                            self._idle_since = time.monotonic()
                        return _in_vain(waited.source, self.what) if self._carrier.has_left(waited.source) else None
                    if 0 <= waited.size != len(answer):
                        return self._wrong_size(waited, len(answer))
                    self._waiting = None
                    if self._idle_since:
                        self._carrier.waited(waited.source, time.monotonic() - self._idle_since)
                        self._idle_since = 0.0
                # a generator takes None first, and after a Send
                step, answer = self._program.send(answer), None  # type: ignore[arg-type]
                if isinstance(step, Receive):
                    self._waiting = step
                    continue
                with self._count:
                    self._unsent += 1
                self._carrier.send(self, step)
        except StopIteration:
            self.sent()
        except RingError as error:
            return error
        except Exception as error:  # noqa: BLE001  # nobody else would hear of it: this is a thread of gRPC's
            return RingError(f"{self.what} failed: {error!r}")
        return None

    def _wrong_size(self, step: Receive, size: int) -> Mismatch:
        return Mismatch(
            f"rank {step.source} sent {size} bytes where {self.what} has {step.size} (key {self.key})", rank=step.source
        )

    def _end(self, error: RingError | None) -> None:
        with self._count:
            if self._done.is_set():
                return
            self.error = error
            self._done.set()
            callbacks, self._callbacks = self._callbacks, []
        self._carrier.ended(self)
        for callback in callbacks:
            callback()


def _has_begun(waiting: Receive) -> bool:
    """Whether the rank that is waited for has sent something, and so may wait for others itself."""
    return waiting.tag > 0 or waiting.part > 0


def _in_vain(rank: int, what: str) -> PeerLost:
    return PeerLost(f"rank {rank} has left, and {what} waits for it", rank=rank)
