"""The optimizer that goes with deep gradient compression.

Momentum of gradients is corrected before they are sent; an optimizer that applied it once more would apply it twice.
"""

from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from fedring.compress.dgc import DGC


class DGCSGD(Optimizer):
    """Stochastic gradient descent whose momentum and Nesterov act on weight decay only."""

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float,
        *,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        if lr < 0 or not 0 <= momentum < 1 or weight_decay < 0 or (nesterov and not momentum):
            raise ValueError(f"DGCSGD cannot work with {lr=}, {momentum=}, {weight_decay=}, {nesterov=}")
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov})

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Every parameter has moved against its gradient, as received, and its weight decay."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    if group["weight_decay"]:
                        parameter.sub_(self._decay(parameter, group), alpha=group["lr"])
                    parameter.sub_(parameter.grad, alpha=group["lr"])
        return loss

    def _decay(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """The weight decay of `parameter` with momentum, of its shape."""
        decay: Tensor = parameter * group["weight_decay"]
        if not group["momentum"]:
            return decay
        state = self.state[parameter]
        if "momentum_buffer" in state:
            buffer: Tensor = state["momentum_buffer"].mul_(group["momentum"]).add_(decay)
        else:
            buffer = state["momentum_buffer"] = decay.clone()
        return decay.add_(buffer, alpha=group["momentum"]) if group["nesterov"] else buffer


def check_optimizer(optimizer: Optimizer, config: DGC) -> None:
    """`optimizer` may follow compression by `config`: momentum of gradients acts in one of the two at most."""
    if not config.momentum or isinstance(optimizer, DGCSGD):
        return
    for group in optimizer.param_groups:
        for name in ("momentum", "betas"):
            value = group.get(name, 0)
            if value if isinstance(value, int | float) else any(value):
                raise ValueError(
                    f"{type(optimizer).__name__} has {name}={value}, and DGC has momentum={config.momentum}: momentum "
                    "would act twice. Use DGCSGD, or SGD without momentum, or DGC(momentum=0)."
                )
