"""Training steps over several ranks.

A step is a context, and the backward pass through it.
"""

import threading
from contextvars import Token
from typing import Self

from torch import Tensor

from fedring.remote.agent import Agent
from fedring.remote.contexts import Context, Scope, current
from fedring.remote.errors import CallRefused


def context() -> "Step":
    """Return a step, to be used in a `with` statement.

    Remote calls of this thread in the block belong to its graph.

    Gradients are kept at the owners of their parameters until the end of the block, which frees them and all graphs.
    """
    return Step()


class Step(Scope):
    """One step: its forward and backward pass, and its gradients.

    See `context`.

    Attributes:
        stepping: Held while an optimizer steps, since owners know the two phases of a step only by its context.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stepping = threading.Lock()
        self._token: Token[Scope | None] | None = None

    def __enter__(self) -> Self:
        self._token = current.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        if self._token is not None:
            current.reset(self._token)
        if self.context is not None and isinstance(self.caller, Agent):
            self.caller.end(self.context.number)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """Compute the gradients of the loss at all owners.

        They are those of all parameters that the loss depends on.

        Gradients are added to those of the context. Nothing is written to the `grad` of a tensor, here or there.

        Args:
            loss: A scalar that was computed from results of remote calls in this context.
            retain_graph: Whether another backward pass through the same calls follows.

        Raises:
            Refused: The loss has no graph, or no call was made in this context.
            RemoteError: An owner has failed.
            RingError: A rank is lost.
        """
        context = self.begun()
        if not loss.requires_grad:
            raise CallRefused("the loss does not depend on anything that requires gradients", reason="no_graph")
        context.retain_graph = retain_graph
        context.backward([loss], None)

    def gradients(self) -> dict[Tensor, Tensor]:
        """Return the gradients of this process's own parameters, by parameter."""
        return self.begun().gradients()

    def begun(self) -> Context:
        """Return the context.

        Raises:
            Refused: No remote call was made in it.
        """
        if self.context is None:
            raise CallRefused("no remote call was made in this context", reason="no_context")
        return self.context
