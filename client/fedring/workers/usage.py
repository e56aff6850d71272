"""Seconds and bytes of data-parallel steps.

The shares of the communication hook are counted apart.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

from torch import Tensor
from torch.futures import Future

from fedring.c10d import GradBucket


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
        """The sums and the figures computed from them, by name.

        The client sends them to the server.
        """
        busy = self.wait_seconds + self.compress_seconds + self.decompress_seconds
        return {field.name: round(float(getattr(self, field.name)), 6) for field in fields(Usage)} | {
            "compute_seconds": round(max(0.0, self.seconds - busy), 6),
            "samples_per_second": round(self.samples / self.seconds, 3) if self.seconds else 0.0,
        }


class Hook(Protocol):
    """A communication hook with a meter.

    The epochs of a group use it.
    """

    @property
    def state(self) -> Any:
        """The first argument that DDP passes to `function`."""

    def function(self, state: Any, bucket: GradBucket) -> Future[Tensor]:
        """Exchange a bucket of gradients.

        The future's value is the bucket's buffer, with the mean over all workers.
        """
        ...

    def start_epoch(self, epoch: int) -> None:
        """Note that the next step belongs to an epoch of the job.

        Epochs are counted from 0.
        """

    def end_step(self) -> None:
        """Note that all gradients of the step have been exchanged."""

    def usage(self) -> Usage:
        """Return the times of waiting and compressing so far.

        The other fields are 0.
        """
        ...
