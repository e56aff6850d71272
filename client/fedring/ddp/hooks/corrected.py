"""What hooks with lossy messages remember, whatever the message: what was left out of each tensor."""

from collections.abc import Iterable
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from fedring.compress.correction import Correction, Feedback, result_of, settle, target_of
from fedring.ddp.hooks.gradients import Gradients
from fedring.ddp.hooks.state import HookState
from fedring.ddp.hooks.turns import Steps


class CorrectedState(HookState):
    """The state of a hook whose messages are lossy; a subclass says how they are made."""

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
        self.kept: dict[str, Correction] = {}

    def steps(self, grads: Gradients) -> Steps:
        """The buffer of `grads` comes to hold the mean over all workers, as far as messages tell."""
        raise NotImplementedError

    def targets(self, grads: Gradients) -> list[Tensor]:
        """What to send of each tensor [n], float32."""
        parts = zip(grads.names, grads.flat(), strict=True)
        return [target_of(grad, self._kept(name, grad), self.feedback) for name, grad in parts]

    def settle(self, grads: Gradients, targets: Iterable[Tensor], sent: Iterable[Tensor]) -> None:
        """`sent` [n] of each target [n] counts as sent by this worker."""
        for name, target, what in zip(grads.names, targets, sent, strict=True):
            settle(self.kept[name], target, what, self.feedback)

    def store(self, grads: Gradients, means: Iterable[Tensor]) -> Tensor:
        """The buffer of `grads`, which holds what `means` [n], of all workers' messages, make of each tensor."""
        for name, grad, mean in zip(grads.names, grads.flat(), means, strict=True):
            grad.copy_(result_of(mean, self.kept[name], self.feedback))
        return grads.buffer

    def rescale(self, old_world: int, new_world: int) -> None:
        """As HookState.rescale; EF21 goes on from the estimate that all workers share."""
        for kept in self.kept.values():
            kept.rescale(old_world, new_world)

    def shared(self) -> dict[str, Tensor]:
        """As HookState.shared: EF21's estimates of the mean."""
        if self.feedback != "ef21":
            return {}
        known = (self._whole or self._contents())["shared"]
        return {
            name: known[name].clone() if name in known else torch.zeros(p.numel(), device=p.device)
            for name, p in self.names.parameters.items()
        }

    def regroup(self, shared: dict[str, Tensor], *, steps: int) -> None:
        """As HookState.regroup; workers that came or went have estimates of which the shared one is not the mean."""
        super().regroup(shared, steps=steps)
        for name, estimate in shared.items():
            self.kept[name] = Correction(estimate.clone(), estimate.clone())

    def _kept(self, name: str, grad: Tensor) -> Correction:
        kept = self.kept.get(name)
        if kept is None or kept.own.numel() != grad.numel() * (self.feedback != "none"):  # DDP has made other buckets
            kept = self.kept[name] = Correction.empty(grad.numel(), self.feedback, grad.device)
        return kept

    def _owed(self) -> list[Tensor]:
        return [kept.own for kept in list(self.kept.values())] if self.feedback == "ef" else []

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
        own, shared = self._checked(state["own"]), self._checked(state["shared"])
        if self.feedback == "ef21" and own.keys() != shared.keys():
            raise ValueError(f"the {self.kind} state does not have both estimates of every parameter")
        none = torch.empty(0)
        self.kept = {name: Correction(tensor, shared.get(name, none)) for name, tensor in own.items()}
