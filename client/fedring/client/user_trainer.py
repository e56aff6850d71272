"""A user's own training, in the place of the built-in loop."""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from fedring.train.errors import TrainError
from fedring.train.loop import seeded
from fedring.train.plan import Plan, TrainResult

Trainer = Callable[[nn.Module, Dataset[Any], Plan], Any]
"""(model, samples, plan) -> the number of samples, a mapping with "num_samples", or a TrainResult."""


def run_trainer(
    trainer: Trainer, model: nn.Module, samples: Dataset[Any], plan: Plan, *, device: torch.device
) -> TrainResult:
    """What `trainer` says that it did, checked, with the time that it took; it trains `model` in place on `device`."""
    model.to(device).train()
    with seeded(plan.seed, device):
        began = time.perf_counter()
        told = trainer(model, samples, plan)
        seconds = time.perf_counter() - began
    return replace(_result(told), seconds=seconds)


def _result(told: object) -> TrainResult:
    match told:
        case TrainResult():
            result = told
        case {"num_samples": num_samples, **means}:
            result = TrainResult(
                _count(num_samples), _mean(means.get("loss"), "loss"), _mean(means.get("accuracy"), "accuracy")
            )
        case _:
            result = TrainResult(_count(told))
    if result.num_samples < 1:
        raise TrainError("bad_result", "The trainer says that it used no samples: let it return how many, at least 1.")
    return result


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
