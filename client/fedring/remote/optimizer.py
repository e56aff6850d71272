"""One optimizer for parameters of several owners.

All owners do a step, or none does.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedring.remote import requests
from fedring.remote.errors import BadMessage
from fedring.remote.owner import Owner, Reference
from fedring.remote.stepping import optimizer_class
from fedring.remote.steps import Step
from fedring.remote.values import flatten
from fedring.ring import RingError


@dataclass(frozen=True, slots=True, eq=False)
class RemoteParameter:
    """A parameter: a reference to its holder, and its name there.

    The name is "" if the held value is that tensor itself.
    """

    of: Reference
    name: str


def parameters(*references: Reference) -> list[RemoteParameter]:
    """Return all parameters of references, for a DistributedOptimizer.

    References name modules, or leaf tensors that require gradients.

    Raises:
        RemoteError: A reference names neither.
    """
    asked = [(one, one.owner.ask(requests.Parameters(target=one.key))) for one in references]
    found = []
    for one, future in asked:
        names = future.result()
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise BadMessage(f"{one.owner.name} did not answer with the names of parameters")
        found += [RemoteParameter(one, name) for name in names]
    return found


def gradients(step: Step, reference: Reference) -> dict[str, Tensor]:
    """Return a step's gradients of a reference, by parameter name.

    Raises:
        RemoteError: The owner has not been called within the step.
    """
    request = requests.FetchGradients(context=step.begun().number, target=reference.key)
    found: dict[str, Tensor] = reference.owner.ask(request).result()
    return found


class DistributedOptimizer:
    """An optimizer for parameters of several owners.

    They step in two phases: prepare, then commit or abort.

    Each owner builds an optimizer of the class for its own parameters. Steps on an owner run one after the other.

    Args:
        kind: A class of torch.optim. Only its name is sent.
        remote_parameters: The parameters, as `parameters` returns them.
        options: Keyword arguments of the class.

    Raises:
        ValueError: There are no parameters.
        Refused: The class is not in torch.optim.
        ExceptionGroup: With the errors of all owners that cannot build the optimizer.
        RingError: A rank is lost.
    """

    def __init__(
        self, kind: type[torch.optim.Optimizer], remote_parameters: Iterable[RemoteParameter], **options: Any
    ) -> None:
        places: dict[Owner, list[requests.Place]] = {}
        self._references = []  # the owners keep what the parameters belong to
        for parameter in remote_parameters:
            place = requests.Place(target=parameter.of.key, name=parameter.name)
            places.setdefault(parameter.of.owner, []).append(place)
            self._references.append(parameter.of)
        if not places:
            raise ValueError("remote_parameters is empty: an optimizer needs at least one parameter")
        if optimizer_class(kind.__name__) is not kind:
            raise ValueError(f"{kind.__module__}.{kind.__name__} is not in torch.optim: use one of torch's optimizers")
        # All processes lock owners in the order of their ranks, so that no two of them wait for each other.
        self._owners = sorted(places, key=lambda owner: owner.rank)

        def create(owner: Owner) -> Future[Any]:
            tensors: list[Tensor] = []
            tree = flatten(options, tensors, owner=owner.rank)
            return owner.ask(requests.Create(kind=kind.__name__, parameters=places[owner], options=tree), tensors)

        self._optimizers, errors = _at_all(self._owners, create, lambda owner, made: owner.reference(made).wait())
        _raise(errors, "an optimizer cannot be built")

    def step(self, step: Step) -> None:
        """Apply the gradients of a step at all owners, or at none.

        Raises:
            ExceptionGroup: With the errors of all owners. If it says "no owner has stepped", nothing has changed.
            RingError: A rank is lost. In the second phase, some owners may have stepped, and others not.
        """
        context = step.begun().number
        with step.stepping:
            self._step(context)

    def _step(self, context: int) -> None:
        def phase(kind: type[requests.Prepare | requests.Commit | requests.Abort]) -> Callable[[Owner], Future[Any]]:
            return lambda owner: owner.ask(kind(context=context, optimizer=int(self._optimizers[owner].key)))

        errors: list[Exception] = []
        try:
            ready, errors = _at_all(self._owners, phase(requests.Prepare))
            if not errors and not all(ready.values()):
                # Another step is under way somewhere. Give way, and then wait for the owners in their order.
                _, errors = _at_all([owner for owner in self._owners if ready[owner]], phase(requests.Abort))
                for owner in self._owners:
                    owner.ask(requests.Lock(context=context)).result()
                ready, found = _at_all(self._owners, phase(requests.Prepare))
                errors += found
        except BaseException as error:  # an owner that cannot be locked, or an interrupt: unlock those that are locked
            _, failed = _at_all(self._owners, phase(requests.Abort))
            if isinstance(error, Exception):
                _raise([error, *failed], "no owner has stepped")
            raise
        if errors:
            _, failed = _at_all(self._owners, phase(requests.Abort))
            _raise([*errors, *failed], "no owner has stepped")
        _, errors = _at_all(self._owners, phase(requests.Commit))
        _raise(errors, "some owners have not stepped, or did not answer")


def _at_all(
    owners: Sequence[Owner],
    ask: Callable[[Owner], Future[Any]],
    wait: Callable[[Owner, Future[Any]], Any] = lambda owner, future: future.result(),
) -> tuple[dict[Owner, Any], list[Exception]]:
    """Ask all owners at the same time.

    Returns:
        Their answers, and their errors in the order of the owners.
    """
    asked: list[tuple[Owner, Future[Any]]] = []
    answers: dict[Owner, Any] = {}
    errors: list[Exception] = []
    for owner in owners:
        try:
            asked.append((owner, ask(owner)))
        except Exception as error:  # noqa: BLE001  # the others are asked all the same
            errors.append(error)
    for owner, future in asked:
        try:
            answers[owner] = wait(owner, future)
        except Exception as error:  # noqa: BLE001  # all errors are raised together
            errors.append(error)
    return answers, errors


def _raise(errors: Sequence[Exception], what: str) -> None:
    """Raise several errors together.

    If the generation has ended, raise its error alone.
    """
    for error in errors:
        if isinstance(error, RingError):
            raise error
    if errors:
        raise ExceptionGroup(what, errors)
