"""One optimizer for parameters with many owners: a step is done by all of them, or by none."""

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from fedring.pipeline.owners import Owner, RemoteParameter

_contexts = itertools.count(1)


def new_context() -> int:
    """A number for gradients that belong together, unlike any other of this process."""
    return next(_contexts)


class DistributedOptimizer:
    """Each owner has an optimizer of `optimizer_class` for its parameters, built there with the keyword arguments.

    Of several processes that step the same owners, each must give its contexts numbers of their own.
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        remote_parameters: Sequence[RemoteParameter],
        **options: Any,
    ) -> None:
        if not remote_parameters:
            raise ValueError("an optimizer needs parameters")
        names: dict[str, list[str]] = {}
        owners: dict[str, Owner] = {}
        for parameter in remote_parameters:
            if owners.setdefault(parameter.owner.name, parameter.owner) is not parameter.owner:
                raise ValueError(f"two owners are called {parameter.owner.name}")
            names.setdefault(parameter.owner.name, []).append(parameter.name)
        self._owners = [owners[name] for name in sorted(owners)]  # whoever locks several goes by this order
        self._numbers: dict[str, int] = {}

        def create(owner: Owner) -> None:
            self._numbers[owner.name] = owner.create(optimizer_class, names[owner.name], options)

        _raise(_at_all(self._owners, create), "an optimizer cannot be built")

    def step(self, context: int) -> None:
        """Every owner has applied the context's gradients; or, with an ExceptionGroup of all their errors, none has."""
        locked: list[Owner] = []
        try:
            for owner in self._owners:
                owner.lock()
                locked.append(owner)
            errors = _at_all(locked, lambda owner: owner.prepare(self._numbers[owner.name], context))
        except BaseException as error:  # an owner that cannot be locked, or an interrupt: nobody may stay locked
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
    """The errors of doing the work at all owners at once, in their order."""
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
