"""What data-parallel steps take: seconds and bytes, and how much of them the communication hook takes."""

import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

HookFunction = Callable[[Any, GradBucket], Future[Tensor]]


@dataclass(frozen=True, slots=True)
class Usage:
    """Sums over steps of one worker."""

    steps: int = 0
    samples: int = 0  # taken by this worker
    seconds: float = 0.0
    bytes_sent: int = 0  # to peers
    wait_seconds: float = 0.0  # in which the worker could only wait for peers
    compress_seconds: float = 0.0
    decompress_seconds: float = 0.0
    longest_wait_seconds: float = 0.0  # in one step: a maximum, while all other fields are sums

    def __add__(self, other: "Usage") -> "Usage":
        sums = Usage(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(Usage)))
        return replace(sums, longest_wait_seconds=max(self.longest_wait_seconds, other.longest_wait_seconds))

    def __sub__(self, other: "Usage") -> "Usage":
        sums = Usage(*(getattr(self, field.name) - getattr(other, field.name) for field in fields(Usage)))
        return replace(sums, longest_wait_seconds=self.longest_wait_seconds)

    @property
    def metrics(self) -> dict[str, float]:
        """The sums and what can be computed from them, by name, as the client sends them to the server."""
        busy = self.wait_seconds + self.compress_seconds + self.decompress_seconds
        return {field.name: round(float(getattr(self, field.name)), 6) for field in fields(Usage)} | {
            "compute_seconds": round(max(0.0, self.seconds - busy), 6),
            "samples_per_second": round(self.samples / self.seconds, 3) if self.seconds else 0.0,
        }


class Hook(Protocol):
    """A communication hook that measures itself, as the epochs of a group use it."""

    @property
    def state(self) -> Any:
        """The first argument that DDP passes to `function`."""

    def function(self, state: Any, bucket: GradBucket) -> Future[Tensor]:
        """Exchange a bucket of gradients; the future's value is its buffer with the mean over all workers."""
        ...

    def start_epoch(self, epoch: int) -> None:
        """Note that the next step belongs to that epoch of the job, counted from 0."""

    def end_step(self) -> None:
        """Note that all gradients of the step have been exchanged."""

    def usage(self) -> Usage:
        """Return the times of waiting and compressing so far; the other fields are 0."""
        ...


class TimedHook:
    """A communication hook without a meter of its own, whose waits are measured here.

    A wait goes from the call for the last bucket of a step to the end of the exchange of all buckets.
    """

    def __init__(self, function: HookFunction, state: Any = None) -> None:
        self.state = state
        self._function = function
        self._wait_seconds = self._longest = 0.0
        self._idle_since: float | None = None

    def function(self, state: Any, bucket: GradBucket) -> Future[Tensor]:
        """Call the hook, and note when it was called for the last bucket."""
        future = self._function(state, bucket)
        if bucket.is_last():
            self._idle_since = time.perf_counter()
        return future

    def start_epoch(self, epoch: int) -> None:
        """Do nothing: the hook does not depend on the epoch."""

    def end_step(self) -> None:
        """End the step's wait, and add it up."""
        if self._idle_since is not None:
            waited = time.perf_counter() - self._idle_since
            self._wait_seconds += waited
            self._longest = max(self._longest, waited)
            self._idle_since = None

    def usage(self) -> Usage:
        """Return the sum of the waits, and the longest one."""
        return Usage(wait_seconds=self._wait_seconds, longest_wait_seconds=self._longest)
