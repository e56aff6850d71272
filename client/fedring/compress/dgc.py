"""Deep gradient compression, as functions of tensors.

The method is that of Lin et al. 2018, arXiv 1712.01887.

The law is that nothing is lost. Entries that are not sent now stay in the residual, so that with momentum off

    sent + residual' == residual + gradient

A gradient is that of one worker, not yet divided by the number of workers.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import ceil
from typing import Literal

import torch
from torch import Tensor

from fedring.codec.precision import Precision
from fedring.train.names.hooks import choose_hook

ClipNorm = Literal["tensor", "global"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DGC:
    """The configuration of deep gradient compression.

    The comments say which way is more aggressive: it saves more bytes or time, and costs more accuracy. Making one
    raises ValueError if a value does not fit.
    """

    # Share of the entries sent a step; lower is more aggressive.
    ratio: float = 0.001
    # Epochs in which the share falls exponentially to `ratio`; fewer is more aggressive.
    warmup_epochs: int = 4
    # Momentum of momentum correction, 0 is off; higher is more aggressive, as what is sent late acts longer.
    momentum: float = 0.9
    # Nesterov's momentum; True is more aggressive, as it steps ahead.
    nesterov: bool = False
    # Forget the momentum of what was sent (sec. 3.3); False is more aggressive, as stale momentum continues to act.
    masking: bool = True
    # Largest norm of a gradient over all workers, None is off; lower is more aggressive.
    clip: float | None = None
    # Clip each tensor's gradient, or all together; tensor is more aggressive, as none has to wait for all others.
    clip_norm: ClipNorm = "tensor"
    # Precision of the values that are sent; fp16 is more aggressive than fp32, and sign than fp16.
    precision: Precision = "fp16"
    # Smaller tensors are sent whole; lower is more aggressive.
    min_numel_to_compress: int = 256
    # Share of the entries that the threshold is estimated from; lower is more aggressive.
    sample_ratio: float = 0.01
    # Sample entries at equal distances, or at random; True is more aggressive: fast, but misled by periodic gradients.
    strided: bool = True
    # With less than this share of the wanted entries the threshold falls; lower is more aggressive.
    lower_bound: float = 0.8
    # With more than this multiple of the wanted entries the threshold rises; lower is more aggressive.
    upper_bound: float = 1.3
    # Find too many and keep the largest, instead of raising the threshold; False is more aggressive: it may send fewer.
    resample: bool = True
    # Changes of the threshold; fewer is more aggressive, as a worse one is taken.
    max_iterations: int = 10

    def __post_init__(self) -> None:
        choose_hook("dgc", asdict(self))  # which knows the bounds of each parameter


@dataclass(frozen=True, slots=True, eq=False)
class Taken:
    """Entries that a step took out of a memory.

    With them the step can be undone.
    """

    indices: Tensor | None  # [k] the places; None = all, and before the step's gradient was added
    momentum: Tensor  # [k], or [n]
    residual: Tensor  # [k], or [n]


@dataclass(slots=True, eq=False)
class Memory:
    """One worker's momentum and residual of one tensor."""

    momentum: Tensor  # [n] float32; of a tensor sent whole, the momentum of the mean over all workers
    residual: Tensor  # [n] float32, what is owed
    taken: Taken | None = None  # entries that the newest step took out, until the step counts
    repeats: bool = False  # whether it has the next step's gradient, from a try that broke off

    @staticmethod
    def empty(numel: int, device: torch.device) -> "Memory":
        """Return a memory of `numel` entries that owes nothing."""
        return Memory(torch.zeros(numel, device=device), torch.zeros(numel, device=device))


def ratio_at(config: DGC, epoch: int) -> float:
    """Return the share of entries to send in an epoch (sec. 3.3).

    With 4 warm-up epochs the shares are 25, 6.3, 1.6, 0.4 and 0.1 %.
    """
    return float(config.ratio ** (min(epoch + 1, config.warmup_epochs + 1) / (config.warmup_epochs + 1)))


def kept_count(numel: int, ratio: float) -> int:
    """Return the number of entries to send of `numel` >= 1.

    It is at least one.
    """
    return min(numel, max(1, ceil(numel * ratio)))


def clipped(grad: Tensor, threshold: float, workers: int) -> Tensor:
    """Return `grad` [n], clipped to a norm (sec. 3.2).

    The norm is at most threshold * workers^-1/2.
    """
    norm = float(torch.linalg.vector_norm(grad))
    limit = threshold * workers**-0.5
    return grad * (limit / norm) if norm > limit else grad


def clip_together(grads: Sequence[Tensor], threshold: float, workers: int) -> None:
    """Clip all gradients of one worker to a common norm, in place.

    The norm is at most threshold * workers^-1/2.
    """
    norms = torch.stack([torch.linalg.vector_norm(grad.float()) for grad in grads])
    norm, limit = float(torch.linalg.vector_norm(norms)), threshold * workers**-0.5
    if norm > limit:
        for grad in grads:
            grad.mul_(limit / norm)


def accumulate(grad: Tensor, memory: Memory, config: DGC) -> Tensor:
    """Add a gradient to the residual, with momentum correction (sec. 3.2).

    Args:
        grad: The gradient [n] float32.
        memory: The memory of the tensor; it is updated in place.
        config: How gradients are compressed.

    Returns:
        The residual [n], which is the memory's own tensor.
    """
    momentum, residual = memory.momentum, memory.residual
    if not config.momentum:
        return residual.add_(grad)
    if config.nesterov:
        momentum.add_(grad).mul_(config.momentum)
        return residual.add_(momentum).add_(grad)
    torch.add(grad, momentum, alpha=config.momentum, out=momentum)  # in one pass
    return residual.add_(momentum)


def put_back(memory: Memory) -> None:
    """Undo the newest step's removals from a memory.

    Nothing happens if that step counts already.

    The step's gradient stays in momentum and residual if the tensor is not sent whole. It counts as one more gradient
    of the next step, which is taken with the same parameters, or as that step's own (`Memory.repeats`).
    """
    taken, memory.taken = memory.taken, None
    if taken is None:
        return
    places = slice(None) if taken.indices is None else taken.indices
    memory.momentum[places] = taken.momentum
    memory.residual[places] = taken.residual


def forget(memory: Memory, indices: Tensor, sent: Tensor, config: DGC) -> None:
    """Remove sent entries from the residual, and mask their momentum.

    See sec. 3.3.

    Args:
        memory: The memory of the tensor; it is updated in place.
        indices: Where entries were sent, [k] int64.
        sent: The values that receivers decode, [k] float32, so that rounding errors stay in the residual.
        config: How gradients are compressed.
    """
    before = memory.residual[indices]
    memory.taken = Taken(indices, memory.momentum[indices], before)
    memory.residual[indices] = before - sent
    if config.masking and config.momentum:
        memory.momentum[indices] = 0


def apply_momentum(mean: Tensor, memory: Memory, config: DGC) -> Tensor:
    """Apply ordinary momentum to a tensor that is sent whole.

    Args:
        mean: The mean of its gradient over all workers, [n] float32.
        memory: The memory of the tensor; its momentum is updated in place.
        config: How gradients are compressed.

    Returns:
        The gradient for an optimizer without momentum, [n] float32; it may be the memory's own tensor.
    """
    if not config.momentum:
        return mean
    momentum = memory.momentum
    if config.nesterov:
        return momentum.add_(mean).mul_(config.momentum) + mean
    return momentum.mul_(config.momentum).add_(mean)
