"""The distributed optimizer over several processes: rank 0 gives orders, and the other ranks own parameters."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam

from fedring.pipeline.optimizer import DistributedOptimizer
from fedring.pipeline.owners import LocalOwner
from fedring.pipeline.remote import RemoteOwner, serve
from tests.system.ring_scripts import ranks

CONTEXTS = (1, 2, 3)  # in the second one, rank 2 has a gradient that is not finite


def part_of(rank: int) -> nn.Linear:
    torch.manual_seed(rank)
    return nn.Linear(3, 2)


def take_part(rank: int, size: int) -> Any:
    """Step the parameters of the other ranks (rank 0), or own parameters and return them at the end (other ranks)."""
    if rank == 0:
        return coordinate(size)
    module = part_of(rank)
    owner = LocalOwner(f"mine {rank}", dict(module.named_parameters()))
    for context in CONTEXTS:
        factor = torch.inf if (rank, context) == (2, 2) else 1.0
        owner.add_gradients(context, {name: factor * torch.ones_like(p) for name, p in module.named_parameters()})
    serve(owner, 0)
    return [parameter.flatten().tolist() for parameter in module.parameters()]


def coordinate(size: int) -> list[str]:
    owners = [RemoteOwner(rank) for rank in range(1, size)]
    optimizer = DistributedOptimizer(Adam, [p for owner in owners for p in owner.references()], lr=0.1)
    errors = []
    for context in CONTEXTS:
        try:
            optimizer.step(context)
        except ExceptionGroup as group:
            errors += [f"{context}: {error}" for error in group.exceptions]
    for owner in owners:
        owner.dismiss()
    return errors


@pytest.mark.parametrize("backend", ["gloo", "fedring"])
def test_all_owners_step_or_none(backend: str, tmp_path: Path) -> None:
    errors, *found = ranks.run(take_part, 3, tmp_path, backend=backend)
    assert errors == ["2: rank 2: ValueError: the gradient of weight at mine 2 is not finite"]
    for rank, values in enumerate(found, 1):
        expected = part_of(rank)
        alone = Adam(expected.parameters(), lr=0.1)
        for _ in range(len(CONTEXTS) - 1):
            for parameter in expected.parameters():
                parameter.grad = torch.ones_like(parameter)
            alone.step()
        for value, parameter in zip(values, expected.parameters(), strict=True):
            torch.testing.assert_close(torch.tensor(value), parameter.detach().flatten())
