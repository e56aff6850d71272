"""Owners of parameters: each has local optimizers, gradients for each context, and steps in two phases.

prepare() steps on copies, so that an error changes nothing. Then commit() keeps the step, or abort() undoes it.
"""

import copy
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class Owner(Protocol):
    """The process that has parameters: this one, or another one of a process group."""

    name: str

    def create(self, optimizer_class: type[torch.optim.Optimizer], names: Sequence[str], options: Any) -> int:
        """Build an optimizer of the named parameters at the owner, with keyword arguments, and return its number."""
        ...

    def lock(self) -> None:
        """Wait for other steps, and keep them out until commit() or abort()."""

    def prepare(self, optimizer: int, context: int) -> None:
        """Do the step with the context's gradients, so that it can still be undone."""

    def commit(self, optimizer: int, context: int) -> None:
        """Keep the step, delete the context, and let other steps run."""

    def abort(self, optimizer: int, context: int) -> None:
        """Undo the step, keep the context's gradients, and let other steps run."""


@dataclass(frozen=True, slots=True, eq=False)
class RemoteParameter:
    """A parameter, named by its owner and its name there."""

    owner: Owner
    name: str


@dataclass(frozen=True, slots=True, eq=False)
class _Before:
    """What an abort restores."""

    data: Mapping[Tensor, Tensor]  # the values of each parameter
    state: dict[str, Any]  # of the optimizer


class LocalOwner:
    """The owner of parameters of this process. Its methods may be called from several threads."""

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
        """Return all parameters, for a DistributedOptimizer."""
        return [RemoteParameter(self, name) for name in self._parameters]

    def backward(self, context: int, outputs: Sequence[Tensor], gradients: Sequence[Tensor] | None = None) -> None:
        """Compute gradients and add them to a context; the `grad` of parameters does not change.

        Args:
            context: The number of the step, from new_context().
            outputs: Tensors that were computed from the parameters.
            gradients: The gradient of each output, of its shape; may be left out if all outputs are scalars.
        """
        wanted = [parameter for parameter in self._parameters.values() if parameter.requires_grad]
        found = torch.autograd.grad(list(outputs), wanted, gradients, allow_unused=True)
        pairs = zip(wanted, found, strict=True)
        self.add_gradients(context, {self._names[p]: gradient for p, gradient in pairs if gradient is not None})

    def add_gradients(self, context: int, gradients: Mapping[str, Tensor]) -> None:
        """Add gradients to a context, by the names of their parameters.

        Raises:
            ValueError: If a gradient does not have the shape of its parameter.
        """
        with self._collecting:
            known = self._gradients.setdefault(context, {})
            for name, gradient in gradients.items():
                if gradient.shape != self._parameters[name].shape:
                    raise ValueError(
                        f"the gradient of {name} has the shape {list(gradient.shape)}, but the parameter has "
                        f"{list(self._parameters[name].shape)}"
                    )
                known[name] = known[name] + gradient if name in known else gradient.detach()

    def gradients(self, context: int) -> dict[str, Tensor]:
        """Return the gradients of a context, by the names of their parameters."""
        with self._collecting:
            return dict(self._gradients.get(context, {}))

    def create(self, optimizer_class: type[torch.optim.Optimizer], names: Sequence[str], options: Any) -> int:
        """Build an optimizer of the named parameters, with keyword arguments, and return its number."""
        self._optimizers.append(optimizer_class([self._parameters[name] for name in names], **dict(options)))
        return len(self._optimizers) - 1

    def lock(self) -> None:
        """Wait for other steps, and keep them out until commit() or abort()."""
        self._stepping.acquire()

    def prepare(self, optimizer: int, context: int) -> None:
        """Do the step on copies of parameters and state.

        Raises:
            ValueError: If the context has no gradients of these parameters, or a gradient is not finite.
        """
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
        """Keep the step, delete the context, and let other steps run."""
        self._before = None
        with self._collecting:
            self._gradients.pop(context, None)
        self._stepping.release()

    def abort(self, optimizer: int, context: int) -> None:
        """Restore parameters and state, and let other steps run."""
        before, self._before = self._before, None
        if before is not None:
            stepper = self._optimizers[optimizer]
            for parameter, data in before.data.items():
                parameter.data = data
                parameter.grad = None
            stepper.load_state_dict(before.state)
        self._stepping.release()
