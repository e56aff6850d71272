"""One tensor's part in messages of deep gradient compression."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedring.codec import CodecError
from fedring.codec.gradient import Entries, Part, decode_gradient
from fedring.codec.precision import Precision, to_words
from fedring.compress.correction import is_finite, is_zero
from fedring.compress.dgc import DGC, Memory, Taken, accumulate, apply_momentum, clipped, forget, kept_count
from fedring.compress.dgc_select import select

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DGCStep:
    """A step: equal for all tensors and on all workers."""

    config: DGC
    ratio: float  # share of the entries that is sent
    step: int  # steps before it
    workers: int


def count_to_send(numel: int, step: DGCStep) -> int | None:
    """Return the largest number of entries to send of a tensor.

    It is None for a tensor that is sent whole.
    """
    return None if numel < max(1, step.config.min_numel_to_compress) else kept_count(numel, step.ratio)


def whole_precision(config: DGC) -> Precision:
    """Return the precision of tensors that are sent whole.

    It is never signs, which suit entries of equal magnitude.
    """
    return "fp32" if config.precision == "fp32" else "fp16"


def make_part(grad: Tensor, memory: Memory, step: DGCStep) -> Part:
    """Make this worker's part of the message about one tensor.

    Args:
        grad: The gradient [n] of any float dtype, which is not changed.
        memory: The memory of the tensor [n]. The gradient is added to it, and sent entries are removed.
        step: The step.

    Returns:
        The positions and the values to send, or all values of a tensor that is sent whole. Of a gradient with NaN or
        infinity, only that it has some; the memory stays as it is.
    """
    config = step.config
    grad = grad.to(torch.float32)
    count = count_to_send(grad.numel(), step)
    if not is_finite(grad):
        # Nothing of it may stay in the memory, where it would spoil all later steps. All workers see that it was.
        memory.taken = None
        values = np.full(grad.numel() if count is None else 1, np.nan, np.float32)
        words = to_words(values, whole_precision(config) if count is None else config.precision)
        return Part(None if count is None else np.zeros(1, np.int64), words)
    if config.clip is not None and config.clip_norm == "tensor":
        grad = clipped(grad, config.clip, step.workers)
    # A small tensor is sent whole, without momentum: the receivers apply momentum to the mean.
    if count is None:
        memory.taken = Taken(None, memory.momentum.clone(), memory.residual.clone())
        owed = memory.residual.add_(grad)
        words = to_words(owed.cpu().numpy(), whole_precision(config))
        owed.sub_(torch.tensor(words.values, device=owed.device))
        return Part(None, words)
    # The gradient of a try that broke off is still there, and stands for that of the same step now.
    residual = memory.residual if memory.repeats else accumulate(grad, memory, config)
    memory.repeats = False
    # Of a parameter that no worker has used, DistributedDataParallel would drop all that is sent.
    nothing = torch.empty(0, dtype=torch.int64, device=residual.device)
    indices = nothing if is_zero(grad) else select(residual, count, config, step=step.step)
    words = to_words(residual[indices].cpu().numpy(), config.precision)
    forget(memory, indices, torch.tensor(words.values, device=residual.device), config)
    return Part(indices.cpu().numpy(), words)


def apply_parts(parts: Sequence[Entries], grad: Tensor, memory: Memory, config: DGC) -> None:
    """Replace a gradient by the mean of all workers' parts.

    Momentum is applied here if the tensor was sent whole.

    Args:
        parts: All workers' parts about the tensor. They are added in this order, so that equal parts give equal bits on
            every worker.
        grad: The tensor [n] of any float dtype, which is overwritten.
        memory: This worker's memory of the tensor; the momentum of one that was sent whole is updated.
        config: How gradients are compressed.
    """
    in_place = grad.device.type == "cpu" and grad.dtype == torch.float32
    total = grad.zero_() if in_place else torch.zeros(grad.numel(), device=grad.device)
    add_entries(parts, total)
    total.div_(len(parts))
    if parts[0].positions is None:
        total = apply_momentum(total, memory, config)
    if total is not grad:
        grad.copy_(total)


def read_messages(messages: Sequence[memoryview | bytes], sizes: Sequence[int]) -> list[list[Entries]] | None:
    """Decode all workers' messages about the tensors of a bucket.

    Args:
        messages: The messages, in the order of ranks.
        sizes: The number of entries of each tensor.

    Returns:
        For each worker, its entries of each tensor. None if the gradient of one has NaN or infinity: then all workers
        treat the whole bucket as NaN, as in a mean without compression, so that all skip the same step.

    Raises:
        CodecError: If a message is not valid; the text names its rank.
    """
    decoded = []
    for rank, message in enumerate(messages):
        try:
            decoded.append(decode_gradient(message, sizes=sizes))
        except CodecError as error:
            if error.reason != "non_finite":
                raise CodecError(error.reason, f"from rank {rank}: {error.detail}") from error
            log.debug("the gradient of rank %d has NaN or infinity", rank)
            return None
    return decoded


def add_entries(messages: Sequence[Entries], total: Tensor) -> Tensor:
    """Add the entries of messages to `total` [n] float32, in place.

    They are added in the order given. Returns `total`.
    """
    for entries in messages:
        values = torch.tensor(entries.values, device=total.device)
        if entries.positions is None:
            total.add_(values)
        else:  # positions are unique within a message, so nothing depends on the order of these additions
            total.index_add_(0, torch.from_numpy(entries.positions).to(total.device), values)
    return total
