"""Trainers for the fault tests, named by jobs as "user_trainers:gated"."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedring.codec.digest import name_of
from fedring.offers import offers


@offers("trainer")
def gated(model: nn.Module, samples: Any, plan: Any) -> int:
    """Add the number of the job's round to each value, after waiting at the gate if the test has set one."""
    _wait_at_gate()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(plan.job_round)
    return 1


def _wait_at_gate() -> None:
    """See tests.fault.gate."""
    if gate := os.environ.get("FL_TEST_GATE"):
        Path(gate + ".began").write_text("began")  # blocks until the test reads it
        Path(gate).read_text()  # blocks until the test writes


@offers("trainer")
def tells(model: nn.Module, samples: Any, plan: Any) -> dict[str, float]:
    """Count the steps of a training without taking them, wait at the gate, and report the plan."""
    drawn, steps = plan.subset_size or len(samples), 0
    for _ in range(plan.epochs):
        steps += len(range(0, drawn, plan.batch_size))
    _wait_at_gate()
    figures = {key: getattr(plan, key) for key in ("epochs", "batch_size", "lr", "momentum")}
    return {"num_samples": drawn, "steps": steps, **figures}


@offers("trainer")
def still(model: nn.Module, samples: Any, plan: Any) -> int:
    """Learn nothing, so that the client sends nothing but its residual."""
    return 1


def delta_of(client: int, number: int, size: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return what a client's training of that number adds to a model of `size` values: even integers."""
    drawn = np.random.default_rng([client, number]).integers(-1000, 1001, size)
    return (2 * drawn).astype(np.float32)


@offers("trainer")
def known(model: nn.Module, samples: Any, plan: Any) -> int:
    """Write down the round and the digest of the model, wait at the gate, then add `delta_of` this training."""
    values, notes = next(model.parameters()), Path(os.environ["FL_TEST_NOTES"])
    number = len(notes.read_text().splitlines()) if notes.exists() else 0
    with notes.open("a") as file:
        file.write(json.dumps([plan.round, name_of(values.detach().numpy().tobytes())]) + "\n")
    _wait_at_gate()
    with torch.no_grad():
        delta = delta_of(int(os.environ["FL_TEST_CLIENT"]), number, values.numel())
        values.add_(torch.from_numpy(delta).view_as(values))
    return 1


@offers("trainer")
def steady(model: nn.Module, samples: Any, plan: Any) -> int:
    """Add one to each value."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    return 1


def lesson_of(client: int, round_: int, size: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return what a client learns in a round, whenever and how often it trains it: `size` values."""
    return np.random.default_rng([client, round_]).normal(0, 0.02, size).astype(np.float32)


@offers("trainer")
def lesson(model: nn.Module, samples: Any, plan: Any) -> int:
    """Add `lesson_of` this round to the model."""
    values = next(model.parameters())
    with torch.no_grad():
        learned = lesson_of(int(os.environ["FL_TEST_CLIENT"]), plan.round, values.numel())
        values.add_(torch.from_numpy(learned).view_as(values))
    return 1


class Halves(nn.Module):
    """A model with a tensor that a job may share, and one that it may keep private."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(size))
        self.own = nn.Parameter(torch.zeros(size))


@offers("model")
def halves(size: int) -> nn.Module:
    """Build a model of zeros with both tensors, and no forward."""
    return Halves(size)


@offers("trainer")
def counted(model: Halves, samples: Any, plan: Any) -> int:
    """Add `delta_of` this round to the shared values, and 1 to the private ones."""
    with torch.no_grad():
        delta = delta_of(int(os.environ["FL_TEST_CLIENT"]), plan.round, model.values.numel())
        model.values.add_(torch.from_numpy(delta))
        model.own.add_(1)
    return 1
