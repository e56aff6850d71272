"""The optimizer that goes with deep gradient compression.

Compression applies momentum to the gradients before they are sent. An optimizer with momentum would apply it twice.
"""

from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from fedring.compress.dgc import DGC
from fedring.train.dgc_optimizer import check_momentum


class DGCSGD(Optimizer):
    """Stochastic gradient descent whose momentum acts on weight decay only.

    Args:
        params: The parameters, or groups of them, as torch's optimizers take them.
        lr: The learning rate, at least 0.
        momentum: Of the weight decay, at least 0 and below 1.
        weight_decay: The factor of the parameters that is added to their gradients, at least 0.
        nesterov: Whether the momentum is Nesterov's.
        dampening: The part of each weight decay but the first that does not enter its momentum, from 0 to 1. As for
            torch's SGD, Nesterov's momentum has none.
    """

    follows_dgc = True  # see fedring.train.dgc_optimizer

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float,
        momentum: float = 0.0,
        *,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        dampening: float = 0.0,
    ) -> None:
        impossible = nesterov and (not momentum or dampening)
        if lr < 0 or not 0 <= momentum < 1 or weight_decay < 0 or not 0 <= dampening <= 1 or impossible:
            raise ValueError(f"DGCSGD cannot work with {lr=}, {momentum=}, {weight_decay=}, {nesterov=}, {dampening=}")
        decay = {"weight_decay": weight_decay, "nesterov": nesterov, "dampening": dampening}
        super().__init__(params, {"lr": lr, "momentum": momentum, **decay})

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over a state that was saved before there was dampening, too."""
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("dampening", 0.0)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Move every parameter against its gradient and weight decay.

        The gradient is used as it was received.

        Args:
            closure: As torch's optimizers take it: computes the loss again.

        Returns:
            The loss of `closure`, if there is one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    if group["weight_decay"]:
                        parameter.sub_(self._decay(parameter, group), alpha=group["lr"])
                    # Without momentum, which acts in the compression, before entries are selected.
                    parameter.sub_(parameter.grad, alpha=group["lr"])
        return loss

    def _decay(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """Return the weight decay of `parameter` with momentum, in its shape."""
        decay: Tensor = parameter * group["weight_decay"]
        if not group["momentum"]:
            return decay
        state = self.state[parameter]
        if "momentum_buffer" in state:
            share = 1 - group["dampening"]
            buffer: Tensor = state["momentum_buffer"].mul_(group["momentum"]).add_(decay, alpha=share)
        else:
            buffer = state["momentum_buffer"] = decay.clone()
        return decay.add_(buffer, alpha=group["momentum"]) if group["nesterov"] else buffer


def check_optimizer(optimizer: Optimizer, config: DGC) -> None:
    """Check that only the compression or the optimizer has momentum.

    Args:
        optimizer: The optimizer that follows.
        config: How gradients are compressed.

    Raises:
        ValueError: If both apply momentum to the gradients.
    """
    check_momentum(optimizer, config.momentum)
