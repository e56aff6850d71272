"""torch's hooks without a memory, in a form for every machine.

DistributedDataParallel refuses hooks that are called bf16_compress_hook or bf16_compress_wrapper_hook on a machine
without NCCL, whatever the backend. Gloo and fedring send bfloat16: the hooks here do the same under other names.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future

from fedring.c10d import GradBucket
from fedring.ddp.state import HookState

HookFunction = Callable[[Any, GradBucket], Future[Tensor]]
"""A hook: it takes its state and a bucket, and returns a future of the bucket's buffer with the exchanged gradients."""


class PlainState(HookState):
    """The state of a hook that remembers nothing.

    It has the hook's group, and the meter of its waits.

    Args:
        process_group: The group to exchange with; None is the default group.
    """

    kind = "plain"

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        super().__init__(process_group, ())

    def end_step(self) -> None:
        """See HookState.end_step: all of the step's gradients have been exchanged."""
        self.meter.end_step()


def plain(hook: HookFunction) -> HookFunction:
    """Adapt a hook that takes a process group to a PlainState.

    The hook may also take None as the group.
    """
    return metered(lambda state, bucket: hook(state.process_group, bucket))


def metered(hook: HookFunction) -> HookFunction:
    """Return a hook that reports to the meter of its state.

    The state is a HookState; its meter learns when a step's last bucket has left.
    """

    def metered_hook(state: HookState, bucket: GradBucket) -> Future[Tensor]:
        future = hook(state, bucket)
        if bucket.is_last():
            state.meter.last_bucket_left()
        return future

    return metered_hook


def bf16_hook(process_group: dist.ProcessGroup | None, bucket: GradBucket) -> Future[Tensor]:
    """Send a bucket as bfloat16.

    Args:
        process_group: The group to exchange with; None is the default group.
        bucket: The bucket that DistributedDataParallel has filled.

    Returns:
        A future of the bucket's buffer, which then holds the mean over all workers.
    """
    future: Future[Tensor] = default_hooks.bf16_compress_hook(process_group, bucket)  # type: ignore[arg-type]  # takes None
    return future


def bf16_wrapper(hook: HookFunction) -> HookFunction:
    """Return a hook that rounds the bucket to bfloat16 before `hook`."""

    def bf16_wrapped(state: Any, bucket: GradBucket) -> Future[Tensor]:
        bucket.set_buffer(bucket.buffer().to(torch.bfloat16))
        return hook(state, bucket).then(lambda done: bucket.buffer().copy_(done.value()))

    return bf16_wrapped
