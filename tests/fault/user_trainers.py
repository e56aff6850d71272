"""Trainers for the fault tests, named by jobs as "user_trainers:gated"."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedring.codec.digest import name_of


def gated(model: nn.Module, samples: Any, plan: Any) -> int:
    """Say through one pipe that training began, and go on when another is opened, where the test asks for that."""
    if gate := os.environ.get("FL_TEST_GATE"):
        Path(gate + ".began").write_text("began")  # blocks until the test reads it
        Path(gate).read_text()  # blocks until the test writes
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(plan.job_round)
    return 1


def still(model: nn.Module, samples: Any, plan: Any) -> int:
    """Learn nothing: what is sent then is what was owed."""
    return 1


def delta_of(client: int, number: int, size: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """What a client's training of that number adds to a model of `size` values: even integers, known to the tests."""
    drawn = np.random.default_rng([client, number]).integers(-1000, 1001, size)
    return (2 * drawn).astype(np.float32)


def known(model: nn.Module, samples: Any, plan: Any) -> int:
    """Note the round and the digest of the model, then add what is known; at the gate as the others."""
    values, notes = next(model.parameters()), Path(os.environ["FL_TEST_NOTES"])
    number = len(notes.read_text().splitlines()) if notes.exists() else 0
    with notes.open("a") as file:
        file.write(json.dumps([plan.round, name_of(values.detach().numpy().tobytes())]) + "\n")
    if gate := os.environ.get("FL_TEST_GATE"):
        Path(gate + ".began").write_text("began")
        Path(gate).read_text()
    with torch.no_grad():
        delta = delta_of(int(os.environ["FL_TEST_CLIENT"]), number, values.numel())
        values.add_(torch.from_numpy(delta).view_as(values))
    return 1


def steady(model: nn.Module, samples: Any, plan: Any) -> int:
    """Add one to each value."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    return 1
