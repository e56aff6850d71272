"""The common part of hooks with lossy messages.

They remember the part of each tensor that messages left out.
"""

from collections.abc import Iterable, Sequence
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from fedring.compress.correction import ErrorFeedback, Feedback, result_of, settle, target_of
from fedring.ddp.gradients import Gradients
from fedring.ddp.state import HookState, checked
from fedring.ddp.turns import Steps


class CorrectedState(HookState):
    """The state of a hook whose messages are lossy.

    Subclasses say how messages are made.

    Args:
        process_group: The group to exchange with; None is the default group.
        feedback: The kind of error feedback (`fedring.compress.correction`).
        named_parameters: As from `model.named_parameters()`; without them the state is kept by the index of buckets.

    Attributes:
        kept: The memory of each tensor, by name.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        *,
        feedback: Feedback = "ef",
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    ) -> None:
        super().__init__(process_group, named_parameters)
        if feedback not in get_args(Feedback):
            raise ValueError(f"feedback is one of {', '.join(get_args(Feedback))}, not {feedback!r}")
        self.feedback: Feedback = feedback
        self.kept: dict[str, ErrorFeedback] = {}

    def steps(self, grads: Gradients) -> Steps:
        """Exchange `grads`, and leave the mean in their buffer.

        It is the mean over all workers, as far as messages tell it.
        """
        raise NotImplementedError

    def targets(self, grads: Gradients) -> list[Tensor]:
        """Return the values to send of each tensor, [n] float32.

        They are new tensors.
        """
        parts = zip(grads.names, grads.flat(), strict=True)
        return [target_of(grad, self._kept(name, grad), self.feedback) for name, grad in parts]

    def settle(self, names: Sequence[str], targets: Iterable[Tensor], sent: Iterable[Tensor]) -> None:
        """Keep the parts of the targets that were not sent.

        Args:
            names: The names of the tensors.
            targets: The values to send of each, [n] float32; their memory may be reused.
            sent: The values of each that count as sent by this worker, [n] float32.
        """
        for name, target, part in zip(names, targets, sent, strict=True):
            settle(self.kept[name], target, part, self.feedback)

    def store(self, grads: Gradients, means: Iterable[Tensor]) -> Tensor:
        """Write the result into the buffer of `grads`, and return it.

        Args:
            grads: The tensors.
            means: The mean of all workers' messages about each, [n] float32.
        """
        for name, grad, mean in zip(grads.names, grads.flat(), means, strict=True):
            grad.copy_(result_of(mean, self.kept[name], self.feedback))
        return grads.buffer

    def owed(self) -> dict[str, Tensor]:
        """See HookState.owed; only error feedback ("ef") owes anything."""
        kept = dict(self.kept) if self.feedback == "ef" else {}  # a copy: metrics are read on another thread
        return {name: correction.own for name, correction in kept.items()}

    def rescale(self, old_world: int, new_world: int) -> None:
        """See HookState.rescale; with EF21 the shared estimate stays.

        Each worker continues from the estimate that all workers share.
        """
        for kept in self.kept.values():
            kept.rescale(old_world, new_world)

    def shared(self) -> dict[str, Tensor]:
        """See HookState.shared: EF21's estimates of the mean."""
        if self.feedback != "ef21":
            return {}
        known = (self._counted or self._contents())["shared"]
        return {
            name: known[name].clone() if name in known else torch.zeros(p.numel(), device=p.device)
            for name, p in self.parameters.items()
        }

    def regroup(self, shared: dict[str, Tensor], *, steps: int) -> None:
        """See HookState.regroup; own estimates become the shared one.

        In another group, the shared estimate is not the mean of the workers' own any more.
        """
        super().regroup(shared, steps=steps)
        for name, estimate in shared.items():
            self.kept[name] = ErrorFeedback(estimate.clone(), estimate.clone())

    def _kept(self, name: str, grad: Tensor) -> ErrorFeedback:
        kept = self.kept.get(name)
        if kept is None or kept.own.numel() != grad.numel() * (self.feedback != "none"):  # DDP made other buckets
            kept = self.kept[name] = ErrorFeedback.empty(grad.numel(), self.feedback, grad.device)
        return kept

    def _contents(self) -> dict[str, Any]:
        known = self.kept if self.feedback != "none" else {}
        return {
            "feedback": self.feedback,
            "own": {name: kept.own for name, kept in known.items()},
            "shared": {name: kept.shared for name, kept in known.items() if self.feedback == "ef21"},
        }

    def _load(self, state: dict[str, Any]) -> None:
        if state["feedback"] != self.feedback:
            raise ValueError(f"the {self.kind} state is of feedback {state['feedback']!r}, not {self.feedback!r}")
        own, shared = checked(self, state["own"]), checked(self, state["shared"])
        if self.feedback == "ef21" and own.keys() != shared.keys():
            raise ValueError(f"the {self.kind} state does not have both estimates of every parameter")
        none = torch.empty(0)
        self.kept = {name: ErrorFeedback(tensor, shared.get(name, none)) for name, tensor in own.items()}
