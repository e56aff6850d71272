"""A job's model and optimizer, made by offered code and checked."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from fedring.job_code import job_code
from fedring.train.errors import SeamError
from fedring.train.names.offered import Offered


def build_model(name: str, args: dict[str, Any], seed: int, offered: Offered) -> nn.Module:
    """Build the model that a job names.

    Args:
        name: A callable as "module:attribute" that returns a torch.nn.Module.
        args: Its keyword arguments, as the job gives them.
        seed: Seeds torch's CPU generator, so that the same seed gives the same values.
        offered: The names that jobs may use here.

    Raises:
        SeamError: As Offered.get() raises it, or with the reason no_model.
    """
    build = offered.get("model", name, args)
    if isinstance(build.func if isinstance(build, partial) else build, nn.Module):
        raise SeamError("no_model", f"{name} is a model already: name its class, or a function that makes it.")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        try:
            with job_code():
                model = build()
        except Exception as error:  # the user's code may raise anything
            raise SeamError("no_model", f"The model {name} cannot be built with {args}: {_describe(error)}.") from error
    if not isinstance(model, nn.Module):
        raise SeamError("no_model", f"{name} returned a {type(model).__name__}: let it return a torch.nn.Module.")
    return model


def optimizer_factory(
    name: str, args: dict[str, Any], offered: Offered
) -> Callable[[Any, float, float], torch.optim.Optimizer]:
    """Look up the optimizer that a job names.

    Args:
        name: A callable (parameters, lr, momentum) that returns an optimizer.
        args: Its further keyword arguments, as the job gives them.
        offered: The names that jobs may use here.

    Returns:
        A function of (parameters, lr, momentum). It raises SeamError, with the reason bad_optimizer, if the optimizer
        cannot be made.

    Raises:
        SeamError: As Offered.get() raises it.
    """
    build = offered.get("optimizer", name, args)

    def make(parameters: Any, lr: float, momentum: float) -> torch.optim.Optimizer:
        try:
            with job_code():
                optimizer = build(parameters, lr, momentum)
        except Exception as error:  # the user's code may raise anything
            given = f"lr={lr:g}, momentum={momentum:g} and optimizer_args={args}"
            raise SeamError(
                "bad_optimizer", f"The optimizer {name} cannot be made with {given}: {_describe(error)}."
            ) from error
        if not isinstance(optimizer, torch.optim.Optimizer):
            detail = f"{name} returned a {type(optimizer).__name__}: let it return a torch.optim.Optimizer."
            raise SeamError("bad_optimizer", detail)
        return optimizer

    return make


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).rstrip('.')}" if str(error) else type(error).__name__
