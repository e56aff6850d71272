"""Error feedback for means of lossy messages, as functions of tensors.

"ef" (Seide et al. 2014; Karimireddy et al. 2019, algorithm 1) adds to each gradient what earlier messages left out:

    target = gradient + own    own' = target - sent    result = mean(sent)

so mean(own') + result == mean(own + gradient). "ef21" (Richtárik et al. 2021, arXiv 2106.05203, algorithm 2) sends the
change against an estimate that every worker keeps of its own gradient:

    target = gradient - own    own' = own + sent    result = shared' = shared + mean(sent)

so result == mean(own'). With "none" what is left out is lost. `sent` is what counts as sent by this worker.

A step puts other tensors in the place of those that are kept, and writes into none: who holds on to the old ones can
undo it.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Feedback = Literal["none", "ef", "ef21"]


@dataclass(slots=True, eq=False)
class Correction:
    """What one worker keeps of one tensor."""

    own: Tensor  # [n] float32; empty with "none"
    shared: Tensor  # [n] float32, equal on all workers; empty but with "ef21"

    @staticmethod
    def empty(numel: int, feedback: Feedback, device: torch.device) -> "Correction":
        """Nothing left out of `numel` entries, and nothing estimated."""
        own, shared = numel * (feedback != "none"), numel * (feedback == "ef21")
        return Correction(torch.zeros(own, device=device), torch.zeros(shared, device=device))

    def rescale(self, old_world: int, new_world: int) -> None:
        """The laws hold on in a mean over `new_world` workers instead of `old_world`."""
        if self.shared.numel():
            self.own = self.shared.clone()  # the one estimate that all workers know
        else:
            self.own = self.own * (new_world / old_world)


def target_of(grad: Tensor, kept: Correction, feedback: Feedback) -> Tensor:
    """What to send of `grad` [n] of any float dtype, in a new tensor [n] float32."""
    if feedback == "none":
        return grad.to(torch.float32, copy=True)
    return grad + kept.own if feedback == "ef" else grad - kept.own


def settle(kept: Correction, target: Tensor, sent: Tensor, feedback: Feedback) -> None:
    """`kept` is as the law says after `sent` [n] went out for `target` [n], whose memory may be taken.

    What is not finite is not kept: it would never leave again.
    """
    if feedback == "ef":
        kept.own = torch.sub(target, sent, out=target).nan_to_num_(0.0, 0.0, 0.0)
    elif feedback == "ef21":
        kept.own = torch.add(kept.own, torch.nan_to_num(sent, 0.0, 0.0, 0.0), out=target)


def result_of(mean: Tensor, kept: Correction, feedback: Feedback) -> Tensor:
    """The gradient [n] to train with, of which `mean` [n] is the mean of what all workers have sent."""
    if feedback != "ef21":
        return mean
    before = kept.shared
    kept.shared = before + torch.nan_to_num(mean, 0.0, 0.0, 0.0)
    return before + mean
