"""Where the time and the bytes of compressed steps go."""

import threading
import time
from dataclasses import dataclass, fields


@dataclass(slots=True)
class Profile:
    """Sums over `steps` steps."""

    steps: int = 0
    bytes_sent: int = 0  # this worker's messages, once for each other worker
    wait_seconds: float = 0.0  # with nothing to do but to wait for messages
    longest_wait_seconds: float = 0.0  # in one step
    compress_seconds: float = 0.0
    decompress_seconds: float = 0.0

    def add(self, other: "Profile") -> None:
        """`other`'s steps are counted, too."""
        longest = max(self.longest_wait_seconds, other.longest_wait_seconds)
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))
        self.longest_wait_seconds = longest

    def means(self) -> dict[str, float]:
        """Each sum by its name, divided by the number of steps; without steps, nothing."""
        sums = ("bytes_sent", "wait_seconds", "compress_seconds", "decompress_seconds")
        return {name: getattr(self, name) / self.steps for name in sums} if self.steps else {}


class Meter:
    """Measures the steps of one worker; messages may be received on several threads.

    A wait begins when a step's last message has been sent, for before that there are gradients to compute,
    and is interrupted while messages are decompressed.
    """

    def __init__(self) -> None:
        self.total = Profile()
        self._window = Profile()
        self._step = Profile(steps=1)
        self._lock = threading.Lock()
        self._flying = 0  # messages sent and not yet answered
        self._idle_since: float | None = None  # of this step, once its last message is sent

    def sent(self, size: int, *, began: float, last: bool) -> None:
        """A message that goes out as `size` bytes has been compressed from `began` until now."""
        now = time.perf_counter()
        with self._lock:
            self._step.bytes_sent += size
            self._step.compress_seconds += now - began
            self._flying += 1
            if last:
                self._idle_since = now

    def received(self, *, arrived: float) -> None:
        """The answer to a message has been decompressed from `arrived` until now."""
        now = time.perf_counter()
        with self._lock:
            self._step.decompress_seconds += now - arrived
            self._flying -= 1
            if self._idle_since is None:
                return
            self._step.wait_seconds += max(0.0, arrived - self._idle_since)
            self._idle_since = max(self._idle_since, now)
            if not self._flying:
                self._end_step()

    def end_window(self) -> Profile:
        """The steps since the window before."""
        with self._lock:
            window, self._window = self._window, Profile()
        return window

    def _end_step(self) -> None:
        self._step.longest_wait_seconds = self._step.wait_seconds
        self.total.add(self._step)
        self._window.add(self._step)
        self._step, self._idle_since = Profile(steps=1), None
