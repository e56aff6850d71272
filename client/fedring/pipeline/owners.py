"""Owners of parameters: each has its local optimizer, gradients per context, and steps in two phases.

prepare() steps on copies, so that an error leaves nothing behind; then commit() keeps the step, or abort() undoes it.
"""

import copy
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class Owner(Protocol):
    """Where parameters lie: in this process, or behind a process group."""

    name: str

    def create(self, optimizer_class: type[torch.optim.Optimizer], names: Sequence[str], options: Any) -> int:
        """The number of a new optimizer of these parameters, built at the owner with keyword arguments."""
        ...

    def lock(self) -> None:
        """No other step runs on this owner until commit() or abort()."""

    def prepare(self, optimizer: int, context: int) -> None:
        """The step with the context's gradients is done, and can still be undone."""

    def commit(self, optimizer: int, context: int) -> None:
        """The step holds, the context is gone, and other steps may run."""

    def abort(self, optimizer: int, context: int) -> None:
        """Nothing has changed, the context's gradients are kept, and other steps may run."""


@dataclass(frozen=True, slots=True, eq=False)
class RemoteParameter:
    """A parameter by its name at its owner."""

    owner: Owner
    name: str


@dataclass(frozen=True, slots=True, eq=False)
class _Before:
    """What an abort puts back."""

    data: Mapping[Tensor, Tensor]
    state: dict[str, Any]


class LocalOwner:
    """Parameters of this process; other threads may step them, too."""

    def __init__(self, name: str, parameters: Mapping[str, Tensor]) -> None:
        self.name = name
        self._parameters = dict(parameters)
        self._optimizers: list[torch.optim.Optimizer] = []
        self._gradients: dict[int, dict[str, Tensor]] = {}
        self._names: dict[Tensor, str] = {parameter: known for known, parameter in parameters.items()}
        self._before: _Before | None = None
        self._stepping = threading.Lock()
        self._collecting = threading.Lock()

    def references(self) -> list[RemoteParameter]:
        """All parameters, for a DistributedOptimizer."""
        return [RemoteParameter(self, name) for name in self._parameters]

    def backward(self, context: int, outputs: Sequence[Tensor], gradients: Sequence[Tensor] | None = None) -> None:
        """The gradients of the outputs are added to the context; the parameters' `grad` stays as it is."""
        wanted = [parameter for parameter in self._parameters.values() if parameter.requires_grad]
        found = torch.autograd.grad(list(outputs), wanted, gradients, allow_unused=True)
        pairs = zip(wanted, found, strict=True)
        self.add_gradients(context, {self._names[p]: gradient for p, gradient in pairs if gradient is not None})

    def add_gradients(self, context: int, gradients: Mapping[str, Tensor]) -> None:
        """The gradients, each of its parameter's shape, are added to the context."""
        with self._collecting:
            known = self._gradients.setdefault(context, {})
            for name, gradient in gradients.items():
                if gradient.shape != self._parameters[name].shape:
                    raise ValueError(
                        f"a gradient {list(gradient.shape)} for {name} {list(self._parameters[name].shape)}"
                    )
                known[name] = known[name] + gradient if name in known else gradient.detach()

    def gradients(self, context: int) -> dict[str, Tensor]:
        """What the context holds."""
        with self._collecting:
            return dict(self._gradients.get(context, {}))

    def create(self, optimizer_class: type[torch.optim.Optimizer], names: Sequence[str], options: Any) -> int:
        """The number of a new optimizer of these parameters."""
        self._optimizers.append(optimizer_class([self._parameters[name] for name in names], **dict(options)))
        return len(self._optimizers) - 1

    def lock(self) -> None:
        """No other step runs until commit() or abort()."""
        self._stepping.acquire()

    def prepare(self, optimizer: int, context: int) -> None:
        """The step is done on copies of parameters and state; ValueError if a gradient is not finite or not there."""
        stepper = self._optimizers[optimizer]
        found = self.gradients(context)
        parameters = [p for group in stepper.param_groups for p in group["params"]]
        if not any(self._names[parameter] in found for parameter in parameters):
            raise ValueError(f"{self.name} has no gradients of context {context}")
        for name, gradient in found.items():
            if not bool(torch.isfinite(gradient).all()):
                raise ValueError(f"the gradient of {name} at {self.name} is not finite")
        self._before = _Before({p: p.data for p in parameters}, copy.deepcopy(stepper.state_dict()))
        for parameter in parameters:
            if self._names[parameter] in found:
                parameter.data = parameter.data.clone()
                parameter.grad = found[self._names[parameter]]
        stepper.step()
        stepper.zero_grad()

    def commit(self, optimizer: int, context: int) -> None:
        """The step holds."""
        self._before = None
        with self._collecting:
            self._gradients.pop(context, None)
        self._stepping.release()

    def abort(self, optimizer: int, context: int) -> None:
        """Parameters and state are what they were."""
        before, self._before = self._before, None
        if before is not None:
            stepper = self._optimizers[optimizer]
            for parameter, data in before.data.items():
                parameter.data = data
                parameter.grad = None
            stepper.load_state_dict(before.state)
        self._stepping.release()
