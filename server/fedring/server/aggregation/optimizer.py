"""Server optimizers on the pseudo-gradient: torch.optim, and Yogi.

Reddi et al. 2021, algorithm 1. The combined delta of the clients, negated, is the gradient of one flat parameter. This
equals stepping tensor by tensor only for optimizers that treat each value by itself.
"""

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError

from fedring.server.aggregation.rule import OptimizerError
from fedring.server.aggregation.yogi import Yogi
from fedring.untrusted import parse_json

ELEMENTWISE = (
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD", "Yogi",
)  # fmt: skip
"""The optimizers that treat each value by itself: Yogi, and classes that every supported version of torch.optim has."""

_NOT_FOR_USERS = frozenset({"params", "foreach", "fused", "capturable", "differentiable", "maximize"})


@dataclass(frozen=True)
class ServerOptimizer:
    """The class of an optimizer, and its arguments.

    Attributes:
        name: one of ELEMENTWISE.
        args: keyword arguments, numbers or lists of numbers.

    Raises:
        OptimizerError: if the class is not one of those, or does not take these arguments.
    """

    name: str
    args: Mapping[str, Any]

    def __post_init__(self) -> None:
        if self.name not in ELEMENTWISE:
            known = ", ".join(ELEMENTWISE)
            raise OptimizerError(f"{self.name!r} does not treat each value by itself; those that do: {known}")
        allowed = set(inspect.signature(self._class).parameters) - _NOT_FOR_USERS
        if unknown := sorted(set(self.args) - allowed):
            raise OptimizerError(f"{self.name} takes no {', '.join(unknown)}, but {', '.join(sorted(allowed))}")
        for key, value in self.args.items():
            if not all(_is_number(item) for item in (value if isinstance(value, list | tuple) else (value,))):
                raise OptimizerError(f"{key} = {value!r} is not a number")
        try:
            self._make(torch.zeros(1))
        except (TypeError, ValueError, IndexError) as error:
            raise OptimizerError(f"{self.name}: {error}") from error

    def step(
        self, base: NDArray[np.float32], delta: NDArray[np.float32], state: bytes
    ) -> tuple[NDArray[np.float32], bytes]:
        """Step once.

        Args:
            base: the parameters before the step, [n].
            delta: the combined delta of the clients, [n].
            state: what the step before has returned. The optimizer starts anew if it is empty, or belongs to another
                optimizer, to other arguments, or to a model of another size.

        Returns:
            The parameters after the step, [n], and the state for the next one.

        Raises:
            OptimizerError: if `state` is damaged, or the optimizer keeps something that cannot be saved.
        """
        parameter = torch.from_numpy(base.copy())
        optimizer = self._make(parameter)
        if state and (tensors := self.load(state, len(base))):
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": {0: tensors}, "param_groups": groups})
        parameter.grad = torch.from_numpy(np.negative(delta, dtype=np.float32))
        optimizer.step()
        return parameter.detach().numpy(), self._save(optimizer)

    def _make(self, parameter: torch.Tensor) -> torch.optim.Optimizer:
        args = {key: tuple(value) if isinstance(value, list) else value for key, value in self.args.items()}
        return self._class([parameter.requires_grad_()], **args)

    @property
    def _class(self) -> Callable[..., torch.optim.Optimizer]:
        made: Callable[..., torch.optim.Optimizer] = Yogi if self.name == "Yogi" else getattr(torch.optim, self.name)
        return made

    def _save(self, optimizer: torch.optim.Optimizer) -> bytes:
        state = optimizer.state_dict()["state"].get(0, {})
        tensors = {key: value for key, value in state.items() if value is not None}  # SGD without momentum keeps None
        if odd := [key for key, value in tensors.items() if not isinstance(value, torch.Tensor)]:
            raise OptimizerError(f"{self.name} keeps {', '.join(odd)}, which is not a tensor")
        if lost := [key for key, value in tensors.items() if not bool(torch.isfinite(value).all())]:
            raise OptimizerError(f"{self.name} would keep a value in {', '.join(lost)} that is not finite")
        return safetensors.torch.save(tensors, {"optimizer": self._identity})

    @property
    def _identity(self) -> str:
        return json.dumps([self.name, dict(self.args)], sort_keys=True)

    def load(self, state: bytes, length: int) -> dict[str, torch.Tensor]:
        """Return the tensors of a state.

        There are none if it belongs to another optimizer, or to a model of another size.

        Raises:
            OptimizerError: if it is damaged.
        """
        try:
            tensors = {key: value.clone() for key, value in safetensors.torch.load(state).items()}
            header = parse_json(state[8 : 8 + int.from_bytes(state[:8], "little")])
        except (SafetensorError, ValueError) as error:
            raise OptimizerError(f"not a state: {error}") from error
        same = header.get("__metadata__", {}).get("optimizer") == self._identity
        fits = all(tensor.numel() in (1, length) for tensor in tensors.values())
        return tensors if same and fits else {}


def _is_number(value: object) -> bool:
    return isinstance(value, bool) or (isinstance(value, int | float) and isfinite(value))
