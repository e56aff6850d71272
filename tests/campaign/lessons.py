"""Trainers of the campaign, which jobs name as "tests.campaign.lessons:lesson".

A lesson depends on the client and the round alone, so that whoever knows both knows the update: even integers, which
float32 adds without rounding as long as the model consists of integers, too.
"""

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedring.offers import offers

SIZE = 17_000  # of the models: a dense update is too large for a row of the database, and a sparse one is not
CLIENT, NOTES = "FL_CAMPAIGN_CLIENT", "FL_CAMPAIGN_NOTES"

Values = NDArray[np.float32]  # [SIZE]


def lesson_of(client: int, round_: int, size: int = SIZE) -> Values:
    """Return a client's lesson in a round, however often it trains it."""
    return (2 * np.random.default_rng([client, round_]).integers(-500, 501, size)).astype(np.float32)


def samples_of(client: int, round_: int) -> int:
    """Return for how many samples the lesson counts."""
    return 1 + (7 * client + round_) % 5


@offers("trainer")
def lesson(model: nn.Module, samples: Any, plan: Any) -> int:
    """Add the lesson of this round to the first parameter, and 1 to any other one, which the job keeps private."""
    client = int(os.environ[CLIENT])
    first, *others = model.parameters()
    _note(plan.round)
    with torch.no_grad():
        first.add_(torch.from_numpy(lesson_of(client, plan.round, first.numel())).view_as(first))
        for other in others:
            other.add_(1)
    return samples_of(client, plan.round)


@offers("trainer")
def lesson_of_the_last_is_late(model: nn.Module, samples: Any, plan: Any) -> int:
    """Add the lesson of this round; client-2 takes longer than any round has."""
    if os.environ[CLIENT] == "2":
        threading.Event().wait(600)
    return lesson(model, samples, plan)


@offers("trainer")
def lesson_in_its_own_time(model: nn.Module, samples: Any, plan: Any) -> int:
    """Add the lesson of this round; each client takes longer than the one before it."""
    threading.Event().wait(0.25 * int(os.environ[CLIENT]))
    return lesson(model, samples, plan)


@offers("trainer")
def whim(model: nn.Module, samples: Any, plan: Any) -> int:
    """Add another lesson in each training, so that a round that is trained twice has two updates."""
    client, number = int(os.environ[CLIENT]), _note(plan.round)
    first = next(model.parameters())
    with torch.no_grad():
        first.add_(torch.from_numpy(1e-6 * lesson_of(client, 1_000_000 + number, first.numel())).view_as(first))
    return 1


def common_of(round_: int) -> float:
    """Return the change of each value in a round in which all clients learn the same."""
    return 0.00377 + 0.00001 * (round_ % 7)


@offers("trainer")
def common_lesson(model: nn.Module, samples: Any, plan: Any) -> int:
    """Add the same number to each value, at each client."""
    _note(plan.round)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(common_of(plan.round))
    return 1


def trained_rounds(notes: Path) -> list[int]:
    """Return the rounds of all trainings that have begun, in order."""
    return [int(line) for line in notes.read_text().split()] if notes.exists() else []


def _note(round_: int) -> int:
    """Write down that a training of this round begins; return its number."""
    notes = Path(os.environ[NOTES])
    number = len(trained_rounds(notes))
    with notes.open("a") as file:
        file.write(f"{round_}\n")
    return number


class Halves(nn.Module):
    """A model with a tensor that a job shares, and one that it may keep private."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(size))
        self.own = nn.Parameter(torch.zeros(10))


@offers("model")
def halves(size: int) -> nn.Module:
    """Build a model of zeros with both tensors."""
    return Halves(size)
