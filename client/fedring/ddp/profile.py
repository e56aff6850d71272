"""The meter of hooks: time and bytes of their steps.

Metrics, the figures of a job's rounds and `flctl profile` read the sums; hooks report to the meter.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields


@dataclass(slots=True)
class Profile:
    """Sums over `steps` steps of one worker."""

    steps: int = 0
    bytes_sent: int = 0  # of this worker's messages, to all other workers; 0 where torch itself sends
    wait_seconds: float = 0.0  # with nothing to do but to wait for messages
    longest_wait_seconds: float = 0.0  # of one step
    compress_seconds: float = 0.0  # in hooks of several collectives, decompression is included
    decompress_seconds: float = 0.0

    def add(self, other: "Profile") -> None:
        """Add the sums of `other`; of the longest waits, keep the longer."""
        longest = max(self.longest_wait_seconds, other.longest_wait_seconds)
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))
        self.longest_wait_seconds = longest

    def means(self) -> dict[str, float]:
        """Return each sum per step, by its name.

        Without steps there is none.
        """
        sums = ("bytes_sent", "wait_seconds", "compress_seconds", "decompress_seconds")
        return {name: getattr(self, name) / self.steps for name in sums} if self.steps else {}


class Meter:
    """Measures the steps of one hook on one worker.

    Every HookState has one.

    A hook reports in the way in which it works:

    - `sent` and `received`, if each bucket is one message, and the answers arrive on other threads. A wait then begins
      when the last message of a step has left, since before that there are gradients to compute, and it is interrupted
      while messages are decompressed. The step ends with its last answer.
    - `working`, `waiting` and `end_step`, if the thread of the backward pass does everything.
    - `last_bucket_left` and `end_step`, if torch does everything: what lies between is one wait.
    """

    def __init__(self) -> None:
        self.total = Profile()
        self._window = Profile()
        self._lock = threading.Lock()
        self._step = Profile(steps=1)
        self._unanswered = 0  # messages of this step
        self._idle_since: float | None = None  # the moment since when there is nothing to do but to wait

    def forget_step(self) -> None:
        """Forget the reports and messages of a step that failed."""
        with self._lock:
            self._begin_step()

    def sent(self, size: int, *, began: float, last: bool) -> None:
        """Report that a message has left.

        Args:
            size: Its bytes, once for each other worker.
            began: When its compression began, on the clock of `time.perf_counter`; it has ended now.
            last: Whether it is the last message of the step.
        """
        now = time.perf_counter()
        with self._lock:
            self._step.bytes_sent += size
            self._step.compress_seconds += now - began
            self._unanswered += 1
            if last:
                self._idle_since = now

    def received(self, *, arrived: float) -> None:
        """Report the answer to a message, which is decompressed by now.

        Args:
            arrived: When it arrived, by `time.perf_counter`.
        """
        now = time.perf_counter()
        with self._lock:
            self._step.decompress_seconds += now - arrived
            self._unanswered -= 1
            if self._idle_since is None:
                return
            self._step.wait_seconds += max(0.0, arrived - self._idle_since)
            self._idle_since = max(self._idle_since, now)
            if not self._unanswered:
                self._close_step()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count the time inside, less the waits in it, as compression."""
        began, waited = time.perf_counter(), self._step.wait_seconds
        yield
        with self._lock:
            self._step.compress_seconds += time.perf_counter() - began - (self._step.wait_seconds - waited)

    @contextmanager
    def waiting(self, bytes_sent: int) -> Iterator[None]:
        """Count the time inside as a wait for a collective.

        Args:
            bytes_sent: The bytes that this worker has sent for it.
        """
        began = time.perf_counter()
        yield
        with self._lock:
            self._step.bytes_sent += bytes_sent
            self._step.wait_seconds += time.perf_counter() - began

    def last_bucket_left(self) -> None:
        """Report that all of the step's gradients are on their way."""
        with self._lock:
            self._idle_since = time.perf_counter()

    def end_step(self) -> None:
        """Report that all of the step's gradients have been exchanged.

        Without any other report there was no step.
        """
        with self._lock:
            if self._idle_since is not None:
                self._step.wait_seconds += time.perf_counter() - self._idle_since
            if self._step != Profile(steps=1):
                self._close_step()

    def end_window(self) -> Profile:
        """Return the sums over the steps since the previous call."""
        with self._lock:
            window, self._window = self._window, Profile()
        return window

    def _begin_step(self) -> None:
        self._step = Profile(steps=1)
        self._unanswered = 0
        self._idle_since = None

    def _close_step(self) -> None:
        self._step.longest_wait_seconds = self._step.wait_seconds
        self.total.add(self._step)
        self._window.add(self._step)
        self._begin_step()
