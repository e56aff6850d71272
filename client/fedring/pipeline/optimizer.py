"""One optimizer for parameters that several owners have: all owners do a step, or none does."""

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from fedring.pipeline.owners import Owner, RemoteParameter

_contexts = itertools.count(1)


def new_context() -> int:
    """Return a number for the gradients of one step, which is unique in this process."""
    return next(_contexts)


class DistributedOptimizer:
    """An optimizer for parameters of several owners, which step in two phases (prepare, then commit or abort).

    Each owner builds an optimizer of `optimizer_class` for its own parameters, with the keyword arguments. If several
    processes step the same owners, they must use different numbers for their contexts.
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        remote_parameters: Sequence[RemoteParameter],
        **options: Any,
    ) -> None:
        if not remote_parameters:
            raise ValueError("remote_parameters is empty: an optimizer needs at least one parameter")
        names: dict[str, list[str]] = {}
        owners: dict[str, Owner] = {}
        for parameter in remote_parameters:
            if owners.setdefault(parameter.owner.name, parameter.owner) is not parameter.owner:
                raise ValueError(f"two owners are called {parameter.owner.name}: give each owner its own name")
            names.setdefault(parameter.owner.name, []).append(parameter.name)
        self._owners = [owners[name] for name in sorted(owners)]  # all processes lock in this order, so none deadlocks
        self._numbers: dict[str, int] = {}

        def create(owner: Owner) -> None:
            self._numbers[owner.name] = owner.create(optimizer_class, names[owner.name], options)

        _raise(_at_all(self._owners, create), "an optimizer cannot be built")

    def step(self, context: int) -> None:
        """Let every owner apply the context's gradients, or none of them.

        Args:
            context: The number under which the gradients were added.

        Raises:
            ExceptionGroup: With the errors of all owners. If it says "no owner has stepped", nothing has changed.
        """
        locked: list[Owner] = []
        try:
            for owner in self._owners:
                owner.lock()
                locked.append(owner)
            errors = _at_all(locked, lambda owner: owner.prepare(self._numbers[owner.name], context))
        except BaseException as error:  # an owner that cannot be locked, or an interrupt: unlock those that are locked
            failed = _at_all(locked, lambda owner: owner.abort(self._numbers[owner.name], context))
            if isinstance(error, Exception):
                raise ExceptionGroup("no owner has stepped", [error, *failed]) from None
            raise
        if errors:
            errors += _at_all(locked, lambda owner: owner.abort(self._numbers[owner.name], context))
            _raise(errors, "no owner has stepped")
        errors = _at_all(locked, lambda owner: owner.commit(self._numbers[owner.name], context))
        _raise(errors, "all owners have stepped, but some did not answer")


def _at_all(owners: Sequence[Owner], work: Callable[[Owner], None]) -> list[Exception]:
    """Do the work at all owners at the same time, and return their errors, in the order of the owners."""
    if not owners:
        return []
    errors = []
    with ThreadPoolExecutor(len(owners)) as pool:
        for owner, future in [(owner, pool.submit(work, owner)) for owner in owners]:
            error = future.exception()
            if isinstance(error, Exception):
                error.add_note(f"at owner {owner.name}")
                errors.append(error)
            elif error is not None:
                raise error
    return errors


def _raise(errors: Sequence[Exception], what: str) -> None:
    if errors:
        raise ExceptionGroup(what, errors)
