"""The caller's end of a remote call in a graph of autograd."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fedring.remote.contexts import Context

Backward = Callable[[Sequence[Tensor | None]], Sequence[Tensor | None]]
"""Returns the gradients of a call's inputs, given those of its outputs."""


def attach(context: Context, inputs: Sequence[Tensor], outputs: Sequence[Tensor], backward: Backward) -> list[Tensor]:
    """Attach the outputs of a remote call to the caller's graph.

    Args:
        context: The call's context.
        inputs: The tensors that require gradients, of those that were sent.
        outputs: The tensors that have come, which nobody else has.
        backward: Has the owner compute the gradients.
    """
    with torch.enable_grad():
        apply: Any = _RemoteCall.apply  # torch has no types for it
        return list(apply(backward, tuple(outputs), context.anchor, *inputs))


class _RemoteCall(torch.autograd.Function):
    """The outputs of a remote call, as a function of the graph.

    The owner has run the call, and computes its gradients.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]  # torch's takes anything
        ctx: Any, backward: Backward, outputs: tuple[Tensor, ...], anchor: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.backward_at_owner = backward
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """Return the gradients of the inputs, as the owner has computed them."""
        return (None, None, None, *ctx.backward_at_owner(gradients))
