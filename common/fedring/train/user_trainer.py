"""A user's own training function in place of the built-in loop."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from fedring.train.batches import diverged, size_of
from fedring.train.errors import TrainError
from fedring.train.loop import seeded
from fedring.train.metrics import named_metrics
from fedring.train.plan import Plan, TrainResult

_AT_ONCE = 256  # samples to read in search of NaN

Trainer = Callable[[nn.Module, Dataset[Any], Plan], Any]
"""A function of (model, samples, plan); see docs/clients.md for what it returns."""


def run_trainer(
    trainer: Trainer, model: nn.Module, samples: Dataset[Any], plan: Plan, *, device: torch.device
) -> TrainResult:
    """Train with a user's function.

    Args:
        trainer: The function.
        model: The model, which is moved to `device` and trained in place. Parameters that the function freezes are
            freed after it.
        samples: This client's samples.
        plan: How the job wants it trained. Its seed is set for the time of the training.
        device: Where to train.

    Returns:
        The checked report of the function, with the seconds that it took.

    Raises:
        TrainError: If the function reports nonsense: "bad_result", or "diverged" if a figure is not finite.
    """
    model.to(device).train()
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        with seeded(plan.seed, device):
            began = time.perf_counter()
            told = trainer(model, samples, plan)
            seconds = time.perf_counter() - began
    finally:
        for parameter, required in flags:  # What counts as frozen must not depend on the rounds before.
            parameter.requires_grad_(required)
    try:
        return replace(_result(told), seconds=seconds)
    except TrainError as error:
        if error.reason == "diverged" and size_of(samples):
            cause = diverged(samples, torch.split(torch.arange(size_of(samples)), _AT_ONCE), plan.lr)
            if cause.reason != error.reason:
                raise cause from error
        raise


def _result(told: object) -> TrainResult:
    match told:
        case TrainResult():
            result = told
        case {"num_samples": num_samples, **named}:
            loss, accuracy = (_mean(named.pop(name, None), name) for name in ("loss", "accuracy"))
            result = TrainResult(_count(num_samples), loss, accuracy, named=_named(named))
        case _:
            result = TrainResult(_count(told))
    if result.num_samples < 1:
        raise TrainError(
            "bad_result", "The trainer reports that it used no samples: let it return how many, at least 1."
        )
    return result


def _named(told: Mapping[Any, object]) -> dict[str, float]:
    try:
        return named_metrics(told)
    except ValueError as error:
        raise TrainError("bad_result", f"The trainer's result cannot be used: {error}.") from error


def _count(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise TrainError("bad_result", f"The trainer returned {value!r:.100}: let it return the number of samples it used.")


def _mean(value: object, name: str) -> float | None:
    if value is None:
        return None
    try:
        mean = float(value)  # type: ignore[arg-type]  # TypeError says so at run time
    except (TypeError, ValueError) as error:
        raise TrainError("bad_result", f"The trainer's {name} is {value!r:.100}: let it be a number.") from error
    if not math.isfinite(mean):
        raise TrainError("diverged", f"The trainer's {name} is {mean}: use a lower learning rate.")
    return mean
