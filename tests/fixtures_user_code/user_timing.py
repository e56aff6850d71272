"""Clients that a test releases one by one, or that sleep."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from fedring.data import ClientPart, Split
from fedring.offers import offers


class Named(Dataset[tuple[Tensor, Tensor]]):
    """Eight samples that know whose they are."""

    def __init__(self, part: ClientPart) -> None:
        self.part = part

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.ones(1), torch.tensor(0)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self[index] for index in range(len(self)))


@offers("data")
def named(root: object, download: bool, part: ClientPart) -> Split:
    """Return samples that know whose they are."""
    return Split(Named(part), Named(part), 2)


@offers("trainer")
def held(model: nn.Module, samples: Any, plan: Any) -> int:
    """Add the client's number to each value, after its gate has opened or its nap, if the test has set one."""
    if gates := os.environ.get("FL_TEST_GATES"):
        Path(gates, samples.part.client_id).read_text()  # blocks until the test writes
    if naps := os.environ.get("FL_TEST_NAPS"):
        time.sleep(json.loads(naps)[samples.part.client_id])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1 + samples.part.index)
    return len(samples)
