"""Hooks that need several collectives for each bucket.

They run one after another, on any backend.

All ranks must start collectives in the same order. Callbacks of futures start them in the order in which messages
happen to arrive, which is why torch's PowerSGD with several buckets hangs on Gloo. Here the thread that calls the hook
starts all of them: the first collective of a bucket at once, while the backward pass continues, and all later ones when
the step's last bucket has come, those of all buckets together. So a step waits for as many round trips as one bucket.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from fedring.c10d import GradBucket
from fedring.ddp.profile import Meter


class Waitable(Protocol):
    """Something that completes later: a Work, or a Future."""

    def wait(self) -> Any:
        """Return the result; raise the error if there was one."""


class Collective(NamedTuple):
    """A collective that was started."""

    work: Waitable
    bytes_sent: int  # by this worker, to all others


Steps = Generator[Collective, Any, Tensor]
"""Yields each collective that it has started, is sent its result, and returns the buffer with the exchanged values."""


@dataclass(slots=True)
class _Bucket:
    steps: Steps
    collective: Collective
    future: Future[Tensor]


class Turns:
    """The buckets of the current step that are not exchanged yet."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._buckets: list[_Bucket] = []

    def start(self, bucket: GradBucket, steps: Steps) -> Future[Tensor]:
        """Start a bucket's first collective.

        With the last bucket of a step, all buckets are exchanged.

        Args:
            bucket: The bucket that DistributedDataParallel has filled.
            steps: The exchange of its gradients.

        Returns:
            A future of the result of `steps`. All futures of a step have their values once its last bucket was started.
        """
        if bucket.index() == 0:  # of a step that failed, something may be left
            self._buckets.clear()
            self._meter.forget_step()
        device = bucket.buffer().device
        future: Future[Tensor] = Future(devices=[device] if device.type == "cuda" else None)
        with self._meter.working(), torch.no_grad():
            try:
                self._buckets.append(_Bucket(steps, next(steps), future))
            except StopIteration as end:  # there was nothing to exchange
                future.set_result(end.value)
            if bucket.is_last():
                self._finish()
        if bucket.is_last():
            self._meter.end_step()
        return future

    def _finish(self) -> None:
        """Take turns: one collective of each bucket, until all buckets are exchanged."""
        while self._buckets:
            buckets, self._buckets = self._buckets, []
            for bucket in buckets:
                with self._meter.waiting(bucket.collective.bytes_sent):
                    result = bucket.collective.work.wait()
                try:
                    bucket.collective = bucket.steps.send(result)
                except StopIteration as end:
                    bucket.future.set_result(end.value)
                else:
                    self._buckets.append(bucket)


def run(steps: Steps) -> Tensor:
    """Exchange gradients outside of DistributedDataParallel.

    This waits for each collective, and returns the buffer.
    """
    with torch.no_grad():
        try:
            collective = next(steps)
            while True:
                collective = steps.send(collective.work.wait())
        except StopIteration as end:
            result: Tensor = end.value
            return result


def started(work: dist.Work | None, bytes_sent: int) -> Collective:
    """Return a collective of torch.distributed that was started with `async_op=True`.

    Raises:
        ValueError: If this worker is not in the group, so that there is none.
    """
    if work is None:
        raise ValueError("this worker is not in the process group")
    return Collective(work, bytes_sent)


def mean(
    tensors: Sequence[Tensor], group: dist.ProcessGroup, dtype: torch.dtype
) -> Generator[Collective, Any, list[Tensor]]:
    """Take the mean of each tensor over all workers, in one message.

    Args:
        tensors: Tensors of any shapes and float dtypes.
        group: The workers.
        dtype: The dtype in which they are sent and added.

    Returns:
        The means, in the shapes of `tensors`, as `dtype`.
    """
    workers = group.size()
    wire = torch.cat([tensor.reshape(-1) for tensor in tensors]).div_(workers).to(dtype)  # divided first: no overflow
    sent = 2 * (workers - 1) * wire.nbytes // workers  # as in a ring
    yield started(dist.all_reduce(wire, group=group, async_op=True), sent)
    parts = torch.split(wire, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
