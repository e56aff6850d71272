"""Error feedback for means of lossy messages over all workers.

The functions are of tensors.

"ef" (Seide et al. 2014, section 3; Karimireddy et al. 2019, algorithm 1) adds to each gradient what earlier messages
left out:

    target = gradient + own    own' = target - sent    result = mean(sent)

so mean(own') + result == mean(own + gradient). "ef21" (Richtárik et al. 2021, arXiv 2106.05203, algorithm 2) sends the
difference from an estimate that every worker keeps of its own gradient:

    target = gradient - own    own' = own + sent    result = shared' = shared + mean(sent)

so result == mean(own'). With "none", the rest is lost. `sent` are the values that count as sent by this worker.

With "ef", what is owed rests in a step whose gradient is zero: target = 0, own' = own - sent. If no worker has used a
parameter, DistributedDataParallel drops the result, and with it all that would have been sent.

A step replaces the tensors that are kept, and does not write into them: with the old ones a caller can undo the step.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Feedback = Literal["none", "ef", "ef21"]

_FEW = 1 << 10


@dataclass(slots=True, eq=False)
class ErrorFeedback:
    """One worker's memory of one tensor between steps."""

    own: Tensor  # [n] float32; empty with "none"
    shared: Tensor  # [n] float32, equal on all workers; empty but with "ef21"
    rests: bool = False  # whether nothing of `own` is sent in this step

    @staticmethod
    def empty(numel: int, feedback: Feedback, device: torch.device) -> "ErrorFeedback":
        """Return the memory before the first step.

        Nothing was left out of `numel` entries, and estimates are 0.
        """
        own, shared = numel * (feedback != "none"), numel * (feedback == "ef21")
        return ErrorFeedback(torch.zeros(own, device=device), torch.zeros(shared, device=device))

    def rescale(self, old_world: int, new_world: int) -> None:
        """Adapt the memory to another number of workers.

        The laws stay valid in a mean over `new_world` workers instead of `old_world`.
        """
        if self.shared.numel():
            self.own = self.shared.clone()  # the only estimate that all workers know
        else:
            self.own = self.own * (new_world / old_world)


def is_zero(grad: Tensor) -> bool:
    """Return whether all entries of a gradient [n] are 0.

    So are those of a parameter that was not used.
    """
    if bool(grad[:_FEW].any()):  # the few tell it of most gradients
        return False
    return not grad.numel() or not any(map(bool, torch.aminmax(grad)))  # takes an eighth of the time of any()


def is_finite(grad: Tensor) -> bool:
    """Return whether no entry of a gradient [n] is NaN or infinite."""
    return not grad.numel() or all(bool(end.isfinite()) for end in torch.aminmax(grad))  # in one pass, without a copy


def target_of(grad: Tensor, kept: ErrorFeedback, feedback: Feedback) -> Tensor:
    """Return the values to send.

    Args:
        grad: This worker's gradient [n] of any float dtype.
        kept: This worker's memory of the tensor.
        feedback: The kind of error feedback.

    Returns:
        A new tensor [n] float32.
    """
    if feedback == "none":
        return grad.to(torch.float32, copy=True)
    exact = grad.to(torch.float32)  # a sum with a float64 gradient would be float64
    if feedback == "ef21":
        return exact - kept.own
    kept.rests = is_zero(grad)
    return torch.zeros_like(exact) if kept.rests else exact + kept.own


def settle(kept: ErrorFeedback, target: Tensor, sent: Tensor, feedback: Feedback) -> None:
    """Keep the part that a message left out, according to the law.

    Values that are not finite are not kept, since they would never leave again.

    Args:
        kept: This worker's memory of the tensor; it is replaced.
        target: The values to send, [n] float32; its memory may be reused.
        sent: The part of it that counts as sent, [n] float32.
        feedback: The kind of error feedback.
    """
    if feedback == "ef":
        rest = torch.sub(target, sent, out=target).nan_to_num_(0.0, 0.0, 0.0)
        kept.own = rest.add_(kept.own) if kept.rests else rest
    elif feedback == "ef21":
        kept.own = torch.add(kept.own, torch.nan_to_num(sent, 0.0, 0.0, 0.0), out=target)


def result_of(mean: Tensor, kept: ErrorFeedback, feedback: Feedback) -> Tensor:
    """Return the gradient [n] to train with.

    Args:
        mean: The mean of all workers' sent values, [n] float32.
        kept: This worker's memory of the tensor; the estimate that all workers share is replaced.
        feedback: The kind of error feedback.
    """
    if feedback != "ef21":
        return mean
    before = kept.shared
    kept.shared = before + torch.nan_to_num(mean, 0.0, 0.0, 0.0)
    return before + mean
