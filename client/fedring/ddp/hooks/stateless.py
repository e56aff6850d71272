"""Hooks without a memory. Torch's own serve where they are accepted everywhere.

DistributedDataParallel refuses hooks that are called bf16_compress_hook or bf16_compress_wrapper_hook on a machine
without NCCL, whatever the backend. Gloo and fedring send bfloat16: these bear other names, and do the same.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future

Hook = Callable[[Any, GradBucket], Future[Tensor]]


def bf16_hook(process_group: dist.ProcessGroup | None, bucket: GradBucket) -> Future[Tensor]:
    """A future of the mean of all workers' buckets, sent as bfloat16."""
    future: Future[Tensor] = default_hooks.bf16_compress_hook(process_group, bucket)  # type: ignore[arg-type]  # takes None
    return future


def bf16_wrapper(hook: Hook) -> Hook:
    """`hook` on buckets rounded to bfloat16."""

    def bf16_wrapped(state: Any, bucket: GradBucket) -> Future[Tensor]:
        bucket.set_buffer(bucket.buffer().to(torch.bfloat16))
        return hook(state, bucket).then(lambda done: bucket.buffer().copy_(done.value()))

    return bf16_wrapped
