"""Where the time and the bytes of data-parallel steps go."""

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
    """Sums over steps."""

    steps: int = 0
    samples: int = 0  # that this worker took
    seconds: float = 0.0
    bytes_sent: int = 0  # to peers
    wait_seconds: float = 0.0  # with nothing to do but to wait for peers
    compress_seconds: float = 0.0
    decompress_seconds: float = 0.0
    longest_wait_seconds: float = 0.0  # of one step: the largest, where all others are added

    def __add__(self, other: "Usage") -> "Usage":
        sums = Usage(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(Usage)))
        return replace(sums, longest_wait_seconds=max(self.longest_wait_seconds, other.longest_wait_seconds))

    def __sub__(self, other: "Usage") -> "Usage":
        sums = Usage(*(getattr(self, field.name) - getattr(other, field.name) for field in fields(Usage)))
        return replace(sums, longest_wait_seconds=self.longest_wait_seconds)

    @property
    def metrics(self) -> dict[str, float]:
        """The sums, and what follows from them, by name."""
        busy = self.wait_seconds + self.compress_seconds + self.decompress_seconds
        return {field.name: round(float(getattr(self, field.name)), 6) for field in fields(Usage)} | {
            "compute_seconds": round(max(0.0, self.seconds - busy), 6),
            "samples_per_second": round(self.samples / self.seconds, 3) if self.seconds else 0.0,
        }


class Hook(Protocol):
    """How a step's gradients are exchanged, and what that takes."""

    @property
    def state(self) -> Any:
        """What DDP passes to `function` beside the bucket."""

    def function(self, state: Any, bucket: GradBucket) -> Future[Tensor]:
        """A future of the bucket's buffer with the mean over all workers."""
        ...

    def start_epoch(self, epoch: int) -> None:
        """The next step is in that epoch of the job, counted from 0."""

    def end_step(self) -> None:
        """The step's gradients are all exchanged."""

    def usage(self) -> Usage:
        """What waiting and compressing have taken so far, and nothing else."""
        ...


class TimedHook:
    """A communication hook and its waits: from the last bucket's departure to the arrival of all."""

    def __init__(self, function: HookFunction, state: Any = None) -> None:
        self.state = state
        self._function = function
        self._wait_seconds = self._longest = 0.0
        self._idle_since: float | None = None

    def function(self, state: Any, bucket: GradBucket) -> Future[Tensor]:
        """What the hook does."""
        future = self._function(state, bucket)
        if bucket.is_last():
            self._idle_since = time.perf_counter()
        return future

    def start_epoch(self, epoch: int) -> None:
        """No epoch differs from another."""

    def end_step(self) -> None:
        """The step's gradients are all exchanged."""
        if self._idle_since is not None:
            waited = time.perf_counter() - self._idle_since
            self._wait_seconds += waited
            self._longest = max(self._longest, waited)
            self._idle_since = None

    def usage(self) -> Usage:
        """The sum of the waits."""
        return Usage(wait_seconds=self._wait_seconds, longest_wait_seconds=self._longest)
