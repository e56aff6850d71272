"""One tensor's part of a step: what goes into the message, and what the messages of all workers make of it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedring.codec.gradient import Entries, Part
from fedring.codec.precision import Precision, to_words
from fedring.compress.dgc import DGC, Memory, Taken, accumulate, apply_momentum, clipped, forget, kept_count
from fedring.compress.dgc_select import select


@dataclass(frozen=True, slots=True)
class Round:
    """What is equal for all tensors of a step, on all workers."""

    config: DGC
    ratio: float
    step: int
    workers: int


def count_to_send(numel: int, this: Round) -> int | None:
    """The most entries sent of a tensor of `numel`; None: it is sent whole."""
    return None if numel < max(1, this.config.min_numel_to_compress) else kept_count(numel, this.ratio)


def whole_precision(config: DGC) -> Precision:
    """The precision of tensors sent whole: not signs, which are for entries of about equal magnitude."""
    return "fp32" if config.precision == "fp32" else "fp16"


def make_part(grad: Tensor, memory: Memory, this: Round) -> Part:
    """This worker's part of the message for `grad` [n] of any float dtype, which is not changed; `memory` is."""
    config = this.config
    grad = grad.to(torch.float32)
    if config.clip is not None and config.clip_norm == "tensor":
        grad = clipped(grad, config.clip, this.workers)
    count = count_to_send(grad.numel(), this)
    if count is None:
        memory.taken = Taken(None, memory.momentum.clone(), memory.residual.clone())
        owed = memory.residual.add_(grad)
        words = to_words(owed.cpu().numpy(), whole_precision(config))
        owed.sub_(torch.tensor(words.values, device=owed.device))
        return Part(None, words)
    residual = accumulate(grad, memory, config)
    indices = select(residual, count, config, step=this.step)
    words = to_words(residual[indices].cpu().numpy(), config.precision)
    forget(memory, indices, torch.tensor(words.values, device=residual.device), config)
    return Part(indices.cpu().numpy(), words)


def apply_parts(parts: Sequence[Entries], grad: Tensor, memory: Memory, config: DGC) -> None:
    """`grad` [n] holds the mean of all workers' `parts`, with momentum if they are whole.

    Parts are added in the order given, so that equal parts make equal bits on every worker.
    """
    in_place = grad.device.type == "cpu" and grad.dtype == torch.float32
    total = grad.zero_() if in_place else torch.zeros(grad.numel(), device=grad.device)
    for part in parts:
        values = torch.tensor(part.values, device=total.device)
        if part.positions is None:
            total.add_(values)
        else:  # positions are unique within a part, so nothing depends on an order of additions
            total.index_add_(0, torch.from_numpy(part.positions).to(total.device), values)
    total.div_(len(parts))
    if parts[0].positions is None:
        total = apply_momentum(total, memory, config)
    if total is not grad:
        grad.copy_(total)
