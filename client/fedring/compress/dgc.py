"""Deep gradient compression (Lin et al. 2018, arXiv 1712.01887), as functions of tensors.

The one law: nothing is lost. What is not sent now stays in the residual, so with momentum off

    sent + residual' == residual + gradient

A gradient is one worker's own, not yet divided by the number of workers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal, get_args

import torch
from torch import Tensor

from fedring.codec.precision import Precision

ClipNorm = Literal["tensor", "global"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DGC:
    """How gradients are compressed; "aggressive" is what saves more bytes or time and costs more accuracy."""

    # Share of the entries sent a step; lower is more aggressive.
    ratio: float = 0.001
    # Epochs in which the share falls exponentially to `ratio`; fewer is more aggressive.
    warmup_epochs: int = 4
    # Of momentum correction, 0 is off; higher is more aggressive, as what is sent late acts longer.
    momentum: float = 0.9
    # Nesterov's momentum; True is more aggressive, as it steps ahead.
    nesterov: bool = False
    # Forget the momentum of what was sent (sec. 3.3); False is more aggressive, as stale momentum acts on.
    masking: bool = True
    # Largest norm of a gradient over all workers, None is off; lower is more aggressive.
    clip: float | None = None
    # Of each tensor's gradient, or of all together; tensor is more aggressive, as none has to wait for all others.
    clip_norm: ClipNorm = "tensor"
    # Of the values on the wire; fp16 is more aggressive than fp32, and sign than fp16.
    precision: Precision = "fp16"
    # Smaller tensors are sent whole; lower is more aggressive.
    min_numel_to_compress: int = 256
    # Share of the entries that the threshold is estimated from; lower is more aggressive.
    sample_ratio: float = 0.01
    # Sample every so many-th entry, or at random; True is more aggressive: fast, and blind to periods.
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
        ranges = {
            "ratio": 0 < self.ratio <= 1,
            "warmup_epochs": self.warmup_epochs >= 0,
            "momentum": 0 <= self.momentum < 1,
            "nesterov": not self.nesterov or self.momentum > 0,
            "clip": self.clip is None or self.clip > 0,
            "clip_norm": self.clip_norm in get_args(ClipNorm),
            "precision": self.precision in ("fp32", "fp16", "sign"),
            "min_numel_to_compress": self.min_numel_to_compress >= 0,
            "sample_ratio": 0 < self.sample_ratio <= 1,
            "lower_bound": 0 < self.lower_bound < 1,
            "upper_bound": self.upper_bound > 1,
            "max_iterations": self.max_iterations >= 0,
        }
        if wrong := [name for name, right in ranges.items() if not right]:
            raise ValueError("; ".join(f"DGC cannot work with {name}={getattr(self, name)!r}" for name in wrong))


@dataclass(frozen=True, slots=True, eq=False)
class Taken:
    """What a memory held before a step took from it."""

    indices: Tensor | None  # [k] where; None = everywhere, and before the step's gradient came to it
    momentum: Tensor  # [k], or [n]
    residual: Tensor  # [k], or [n]


@dataclass(slots=True, eq=False)
class Memory:
    """What one tensor owes to later steps."""

    momentum: Tensor  # [n] float32; of a tensor sent whole, the momentum of the mean over all workers
    residual: Tensor  # [n] float32
    taken: Taken | None = None  # by the newest step, until it counts

    @staticmethod
    def empty(numel: int, device: torch.device) -> "Memory":
        """Nothing owed for `numel` entries."""
        return Memory(torch.zeros(numel, device=device), torch.zeros(numel, device=device))


def ratio_at(config: DGC, epoch: int) -> float:
    """The share of entries to send in `epoch` (sec. 3.3): with 4 warm-up epochs 25, 6.3, 1.6, 0.4, 0.1 %."""
    return float(config.ratio ** (min(epoch + 1, config.warmup_epochs + 1) / (config.warmup_epochs + 1)))


def kept_count(numel: int, ratio: float) -> int:
    """How many of `numel` >= 1 entries are sent."""
    return min(numel, max(1, ceil(numel * ratio)))


def clipped(grad: Tensor, threshold: float, workers: int) -> Tensor:
    """`grad` [n], scaled down to a norm of at most threshold * workers^-1/2 (sec. 3.2)."""
    norm = float(torch.linalg.vector_norm(grad))
    limit = threshold * workers**-0.5
    return grad * (limit / norm) if norm > limit else grad


def clip_together(grads: Sequence[Tensor], threshold: float, workers: int) -> None:
    """`grads`, all of one worker's, are scaled down to a norm of at most threshold * workers^-1/2 over all of them."""
    norms = torch.stack([torch.linalg.vector_norm(grad.float()) for grad in grads])
    norm, limit = float(torch.linalg.vector_norm(norms)), threshold * workers**-0.5
    if norm > limit:
        for grad in grads:
            grad.mul_(limit / norm)


def accumulate(grad: Tensor, memory: Memory, config: DGC) -> Tensor:
    """The residual [n] after momentum correction (sec. 3.2) of `grad` [n]; it is the memory's own."""
    momentum, residual = memory.momentum, memory.residual
    if not config.momentum:
        return residual.add_(grad)
    if config.nesterov:
        momentum.add_(grad).mul_(config.momentum)
        return residual.add_(momentum).add_(grad)
    torch.add(grad, momentum, alpha=config.momentum, out=momentum)  # in one pass
    return residual.add_(momentum)


def put_back(memory: Memory) -> None:
    """The newest step has sent nothing of the memory, unless it counts already.

    The step's gradient stays in the residual of a tensor that is not sent whole: it is one more gradient at parameters
    which another step follows.
    """
    taken, memory.taken = memory.taken, None
    if taken is None:
        return
    places = slice(None) if taken.indices is None else taken.indices
    memory.momentum[places] = taken.momentum
    memory.residual[places] = taken.residual


def forget(memory: Memory, indices: Tensor, sent: Tensor, config: DGC) -> None:
    """What was `sent` [k] at `indices` [k] is owed no more; its momentum is masked (sec. 3.3).

    `sent` is what the receivers see, so what rounding took away stays in the residual.
    """
    before = memory.residual[indices]
    memory.taken = Taken(indices, memory.momentum[indices], before)
    memory.residual[indices] = before - sent
    if config.masking and config.momentum:
        memory.momentum[indices] = 0


def apply_momentum(mean: Tensor, memory: Memory, config: DGC) -> Tensor:
    """The step [n] for a tensor sent whole, of which `mean` [n] is the mean over all workers: ordinary momentum."""
    if not config.momentum:
        return mean
    momentum = memory.momentum
    if config.nesterov:
        return momentum.add_(mean).mul_(config.momentum) + mean
    return momentum.mul_(config.momentum).add_(mean)
