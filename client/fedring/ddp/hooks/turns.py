"""Hooks that need several collectives for a bucket, one after another, on any backend.

Ranks must start collectives in one order. What starts them in callbacks of futures does so in the order in which
messages happen to arrive, which is why torch's PowerSGD with several buckets hangs on Gloo. Here the thread that calls
the hook starts all of them: a bucket's first one at once, while backward goes on, and all later ones when the
step's last bucket has come, those of all buckets together. So a step waits for as many round trips as one bucket does.
"""

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from fedring.ddp.profile import Profile


class Waitable(Protocol):
    """A collective on its way: a Work, or a Future."""

    def wait(self) -> Any:
        """What it comes to; raises what it ended with."""


Steps = Generator[Waitable, Any, Tensor]
"""Yields each collective that it has started, is sent what that came to, and returns the buffer with the result."""


@dataclass(slots=True)
class _Flight:
    steps: Steps
    waits_for: Waitable
    future: Future[Tensor]


class Turns:
    """The buckets of a step that are on their way."""

    def __init__(self) -> None:
        self.profile = Profile()  # of all steps so far
        self._step = Profile(steps=1)
        self._flights: list[_Flight] = []

    def start(self, bucket: GradBucket, steps: Steps) -> Future[Tensor]:
        """A future of what `steps` returns; all have their values once the last bucket of a step was started."""
        began = time.perf_counter()
        if bucket.index() == 0:  # forget a step that failed
            self._flights.clear()
            self._step = Profile(steps=1)
        device = bucket.buffer().device
        future: Future[Tensor] = Future(devices=[device] if device.type == "cuda" else None)
        with torch.no_grad():
            self._flights.append(_Flight(steps, next(steps), future))
            if bucket.is_last():
                self._land()
        self._step.compress_seconds += time.perf_counter() - began
        if bucket.is_last():
            self._end_step()
        return future

    def _end_step(self) -> None:
        step = self._step
        step.compress_seconds -= step.wait_seconds
        step.longest_wait_seconds = step.wait_seconds
        self.profile.add(step)

    def _land(self) -> None:
        while self._flights:
            flights, self._flights = self._flights, []
            for flight in flights:
                began = time.perf_counter()
                came = flight.waits_for.wait()
                self._step.wait_seconds += time.perf_counter() - began
                try:
                    flight.waits_for = flight.steps.send(came)
                except StopIteration as end:
                    flight.future.set_result(end.value)
                else:
                    self._flights.append(flight)


def run(steps: Steps) -> Tensor:
    """What `steps` returns, with every collective waited for here."""
    with torch.no_grad():
        try:
            waits_for = next(steps)
            while True:
                waits_for = steps.send(waits_for.wait())
        except StopIteration as end:
            result: Tensor = end.value
            return result


def started(work: dist.Work | None) -> dist.Work:
    """The collective, which this worker takes part in."""
    if work is None:
        raise ValueError("this worker is not in the process group")
    return work


def mean(
    tensors: Sequence[Tensor], group: dist.ProcessGroup, dtype: torch.dtype
) -> Generator[Waitable, Any, list[Tensor]]:
    """The mean of each tensor over all workers, in its shape, sent in one message as `dtype`."""
    wire = torch.cat([tensor.reshape(-1) for tensor in tensors]).div_(group.size()).to(dtype)  # so that none overflows
    yield started(dist.all_reduce(wire, group=group, async_op=True))
    parts = torch.split(wire, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
