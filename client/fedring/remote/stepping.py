"""Optimizers at an owner, which step in two phases.

The first is prepare, on copies; the second is commit or abort.

Steps of several coordinators on one owner run one after the other: a context holds the owner from its first phase to
its last. A step never writes to the memory that parameters have. It makes new memory, which they get when it is
committed, so that calls that run meanwhile, and backward passes that come later, still find the old values.
"""

import copy
import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedring.remote.errors import CallRefused


class OwnedOptimizer:
    """An optimizer of parameters of this rank.

    The caller lets only one step run at a time.

    Args:
        kind: The name of a class of torch.optim.
        parameters: The parameters, each with its name.
        options: Keyword arguments of the class.

    Raises:
        Refused: torch.optim has no such optimizer.
    """

    def __init__(self, kind: str, parameters: Mapping[str, Tensor], options: Mapping[str, Any]) -> None:
        self._parameters = list(parameters.values())
        self._names = list(parameters)
        # The optimizer steps tensors of its own. Between steps they share the parameters' memory, but not their version
        # counters: to a graph that was computed with a parameter, a step does not look like a change in place.
        self._stepped = [parameter.data.requires_grad_() for parameter in self._parameters]
        self._optimizer = optimizer_class(kind)(self._stepped, **options)
        self._before: dict[Tensor, Any] | None = None

    def prepare(self, gradients: Mapping[Tensor, Tensor]) -> None:
        """Do a step on copies.

        Args:
            gradients: The gradients of a context, by parameter.

        Raises:
            Refused: There is no gradient of these parameters, or one is not finite. Nothing has changed.
        """
        found = {index: gradients[one] for index, one in enumerate(self._parameters) if one in gradients}
        if not found:
            raise CallRefused("the context has no gradients of these parameters", reason="no_gradients")
        for index, gradient in found.items():
            values = gradient.coalesce().values() if gradient.is_sparse else gradient
            if not bool(torch.isfinite(values).all()):
                raise CallRefused(f"the gradient of {self._names[index]} is not finite", reason="non_finite")
        # `abort` restores this state; the parameters themselves are not touched before `commit`.
        self._before = {stepped: copy.deepcopy(state) for stepped, state in self._optimizer.state.items()}
        for index, (stepped, parameter) in enumerate(zip(self._stepped, self._parameters, strict=True)):
            stepped.data = parameter.data.clone() if index in found else parameter.data
            stepped.grad = found.get(index)
        try:
            self._optimizer.step()
        finally:
            self._optimizer.zero_grad()

    def commit(self) -> list[Tensor]:
        """Give the parameters their new values.

        Returns the old ones, which calls that run may still use.
        """
        if self._before is None:
            return []
        self._before = None
        old = [parameter.data for parameter in self._parameters]
        for stepped, parameter in zip(self._stepped, self._parameters, strict=True):
            parameter.data = stepped.data
        return old

    def abort(self) -> None:
        """Undo the step of `prepare`."""
        before, self._before = self._before, None
        if before is None:
            return
        self._optimizer.state.clear()
        self._optimizer.state.update(before)
        for stepped, parameter in zip(self._stepped, self._parameters, strict=True):
            stepped.data = parameter.data


class StepLock:
    """Lets one context step at a time.

    Its methods may be called from several threads.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holder: int | None = None
        self._failed: Exception | None = None

    @property
    def holder(self) -> int | None:
        """The context that may step now."""
        return self._holder

    def acquire(self, context: int, *, wait: bool) -> bool:
        """Let a context step.

        If another one does, wait for its end, or return False.

        Raises:
            Refused: This rank does not serve any more.
        """
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._failed is not None or self._holder in (None, context))
            if self._failed is not None:
                raise self._failed
            if self._holder not in (None, context):
                return False
            self._holder = context
        return True

    def check(self, context: int) -> None:
        """Raise Refused unless the context may step."""
        with self._changed:
            if self._holder != context:
                raise CallRefused("this context does not hold the lock of the owner's steps", reason="not_locked")

    def release(self, context: int) -> None:
        """Let the next context step, if this one holds the lock."""
        with self._changed:
            if self._holder == context:
                self._holder = None
                self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """Raise the error for all that wait, now and later."""
        with self._changed:
            self._failed = error
            self._changed.notify_all()


def optimizer_class(name: str) -> Any:
    """Return a class of torch.optim.

    Raises:
        Refused: torch.optim has no such optimizer.
    """
    kind = getattr(torch.optim, name, None)
    if not isinstance(kind, type) or not issubclass(kind, torch.optim.Optimizer) or kind is torch.optim.Optimizer:
        raise CallRefused(f"torch.optim has no optimizer {name!r}", reason="unknown_optimizer")
    return kind
