"""The optimizer Yogi, which torch.optim does not have."""

from collections.abc import Callable
from typing import overload

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT


class Yogi(Optimizer):
    """FedYogi's step, for any parameters and gradients.

    Reddi et al. 2021, algorithm 2. Of a gradient g, with the state m and v of each value:

        m = beta1 m + (1 - beta1) g
        v = v - (1 - beta2) g^2 sign(v - g^2)
        x = x - lr m / (sqrt(v) + eps)

    There is no bias correction, as in the paper. Where Adam's v would shrink fast because gradients have become small,
    Yogi's shrinks by at most (1 - beta2) g^2 a step, so that the learning rate does not jump up.

    Args:
        params: the parameters, or groups of them.
        lr: the learning rate, above 0.
        betas: how much of m and of v a step keeps, each at least 0 and below 1.
        eps: the paper's tau, above 0.
        initial_accumulator_value: the first v. The paper asks for at least tau^2.

    Raises:
        ValueError: if an argument is out of these bounds.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-3,
        initial_accumulator_value: float = 1e-6,
    ) -> None:
        if not lr > 0:
            raise ValueError(f"lr must be above 0, and is {lr}")
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be two numbers of at least 0 and below 1, and are {betas}")
        if not eps > 0:
            raise ValueError(f"eps must be above 0, and is {eps}")
        if not initial_accumulator_value >= 0:
            raise ValueError(f"initial_accumulator_value must be at least 0, and is {initial_accumulator_value}")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "initial_accumulator_value": initial_accumulator_value}
        super().__init__(params, defaults)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Step once along the gradients.

        `closure`, if given, computes them and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                gradient, state = parameter.grad, self.state[parameter]
                if gradient is None:
                    continue
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.full_like(parameter, group["initial_accumulator_value"])
                mean, squares = state["exp_avg"], state["exp_avg_sq"]
                mean.lerp_(gradient, 1 - beta1)
                square = gradient * gradient
                squares.addcmul_(square, torch.sign(squares - square), value=beta2 - 1)
                parameter.addcdiv_(mean, squares.sqrt().add_(group["eps"]), value=-group["lr"])
        return loss
