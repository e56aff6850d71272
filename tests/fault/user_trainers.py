"""Trainers for the fault tests, named by jobs as "user_trainers:gated"."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn


def gated(model: nn.Module, samples: Any, plan: Any) -> int:
    """Say through one pipe that training began, and go on when another is opened, where the test asks for that."""
    if gate := os.environ.get("FL_TEST_GATE"):
        Path(gate + ".began").write_text("began")  # blocks until the test reads it
        Path(gate).read_text()  # blocks until the test writes
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(plan.job_round)
    return 1


def noted(model: nn.Module, samples: Any, plan: Any) -> int:
    """Add one, and note in a file from what; at the gate as the other."""
    values = next(model.parameters())
    with Path(os.environ["FL_TEST_NOTES"]).open("a") as notes:
        notes.write(f"{values.flatten()[0].item():g}\n")
    if gate := os.environ.get("FL_TEST_GATE"):
        Path(gate + ".began").write_text("began")
        Path(gate).read_text()
    with torch.no_grad():
        values.add_(1)
    return 1


def steady(model: nn.Module, samples: Any, plan: Any) -> int:
    """Add one to each value."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    return 1
