"""The seam for users' code: what a job names as "module:attribute", or "torchvision:resnet18" for torchvision's models.

Only modules that the operator trusts are imported.
"""

import importlib
import inspect
import json
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from types import ModuleType
from typing import Any

import torch
from torch import nn

from fedring import vision
from fedring.train.errors import SeamError

_USUAL_MODULES = ("fedring.train.models", "fedring.data", "fedring.train.losses", "fedring.train.optimizers")
_NEAR = 0.7  # how similar a name must be to be suggested, from 0 to 1


def resolve(name: str, trusted: Sequence[str]) -> Any:
    """Import the callable that a job names.

    Args:
        name: A callable as "module:attribute".
        trusted: The modules that may be imported; modules below them are trusted, too.

    Raises:
        SeamError: With the reason bad_name, not_trusted, no_module, no_attribute or not_callable.
    """
    module_name, colon, attribute = name.partition(":")
    if not colon or not attribute.isidentifier() or not all(p.isidentifier() for p in module_name.split(".")):
        raise SeamError("bad_name", f"The name {name!r} is not of the form module:attribute{_with_module(name)}")
    _check_trusted(module_name, trusted, name)
    if module_name == "torchvision":
        return _torchvision_model(attribute)
    module = _import(module_name, name)
    if attribute.startswith("_") or not hasattr(module, attribute):
        raise SeamError("no_attribute", _missing(name, module_name, attribute, dir(module)))
    value = getattr(module, attribute)
    if not callable(value):
        raise SeamError("not_callable", f"{name} is a {type(value).__name__}: name a function or a class.")
    if inspect.isroutine(value) or inspect.isclass(value):
        # A trusted module may import others, and a job must not reach those through it.
        _check_trusted(getattr(value, "__module__", None) or module_name, trusted, name)
    return value


def build_model(name: str, args: dict[str, Any], seed: int, trusted: Sequence[str]) -> nn.Module:
    """Build the model that a job names.

    Args:
        name: A callable as "module:attribute" that returns a torch.nn.Module.
        args: Its keyword arguments.
        seed: Seeds torch's CPU generator, so that the same seed gives the same values.
        trusted: As for resolve().

    Raises:
        SeamError: As for resolve(), or with the reason no_model.
    """
    build = resolve(name, trusted)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        try:
            model = build(**args)
        except (Exception, SystemExit) as error:  # the user's code may raise anything
            raise SeamError("no_model", f"The model {name} cannot be built with {args}: {_describe(error)}.") from error
    if not isinstance(model, nn.Module):
        raise SeamError("no_model", f"{name} returned a {type(model).__name__}: let it return a torch.nn.Module.")
    return model


def optimizer_factory(
    name: str, args: dict[str, Any], trusted: Sequence[str]
) -> Callable[[Any, float, float], torch.optim.Optimizer]:
    """Import the optimizer that a job names.

    Args:
        name: A callable (parameters, lr, momentum) that returns an optimizer.
        args: Its further keyword arguments.
        trusted: As for resolve().

    Returns:
        A function of (parameters, lr, momentum). It raises SeamError, with the reason bad_optimizer, if the optimizer
        cannot be made.

    Raises:
        SeamError: As for resolve().
    """
    build = resolve(name, trusted)

    def make(parameters: Any, lr: float, momentum: float) -> torch.optim.Optimizer:
        try:
            optimizer = build(parameters, lr, momentum, **args)
        except (Exception, SystemExit) as error:  # the user's code may raise anything
            given = f"lr={lr:g}, momentum={momentum:g} and optimizer_args={args}"
            raise SeamError(
                "bad_optimizer", f"The optimizer {name} cannot be made with {given}: {_describe(error)}."
            ) from error
        if not isinstance(optimizer, torch.optim.Optimizer):
            detail = f"{name} returned a {type(optimizer).__name__}: let it return a torch.optim.Optimizer."
            raise SeamError("bad_optimizer", detail)
        return optimizer

    return make


def _check_trusted(module_name: str, trusted: Sequence[str], name: str) -> None:
    if not any(module_name == root or module_name.startswith(root + ".") for root in trusted):
        wider = json.dumps([*trusted, module_name])
        detail = f"{name} lies in {module_name}, which this daemon does not trust: start it with trusted='{wider}'."
        raise SeamError("not_trusted", detail)


def _import(module_name: str, name: str) -> ModuleType:
    try:
        if module_name.startswith("torchvision."):
            vision.load()
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        detail = (
            f"There is no module {error.name}, which {name} needs: install it where this program runs, "
            "add its folder to PYTHONPATH, or correct the name."
        )
        raise SeamError("no_module", detail) from error
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise SeamError("no_module", f"{module_name}, for {name}, cannot be imported: {_describe(error)}.") from error


def _torchvision_model(attribute: str) -> Callable[..., Any]:
    name = f"torchvision:{attribute}"
    try:
        vision.load()
    except ImportError as error:
        detail = f"There is no module torchvision, which {name} needs: install it here."
        raise SeamError("no_module", detail) from error
    from torchvision import models

    known = models.list_models(module=models)  # classification only: other models download weights when they are built
    if attribute not in known:
        raise SeamError("no_attribute", _missing(name, "torchvision.models", attribute, known))

    def build(**args: Any) -> Any:
        return models.get_model(attribute, weights=None, **args)

    return build


def _with_module(attribute: str) -> str:
    """Return which of the usual modules has the attribute, as the end of a sentence."""
    for module_name in _USUAL_MODULES:
        if not attribute.startswith("_") and hasattr(importlib.import_module(module_name), attribute):
            return f": did you mean {module_name}:{attribute}?"
    try:
        vision.load()
    except ImportError:
        return "."
    from torchvision import models

    return f": did you mean torchvision:{attribute}?" if attribute in models.list_models(module=models) else "."


def _missing(name: str, module_name: str, attribute: str, known: Iterable[str]) -> str:
    near = get_close_matches(attribute, [k for k in known if not k.startswith("_")], n=1, cutoff=_NEAR)
    advice = f"did you mean {name.partition(':')[0]}:{near[0]}?" if near else "correct the name."
    return f"There is no {attribute} in {module_name}: {advice}"


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).rstrip('.')}" if str(error) else type(error).__name__
