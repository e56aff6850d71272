"""Training in one process, whose result tests compare with that of groups of workers."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fedring.workers.shards import GroupRank, shares


def train_in_one_process(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    samples: Any,
    orders: Iterable[Tensor],
    *,
    batch: int,
    replicas: int = 1,
) -> nn.Module:
    """Train a classifier as an undisturbed group would, and return it.

    Args:
        model: maps a batch of inputs to logits.
        optimizer: of the model's parameters.
        samples: a `fedring.data` set.
        orders: indices of samples, int64, one tensor for each epoch.
        batch: the batch size of each replica.
        replicas: how many workers share each step.
    """
    for order in orders:
        ranks = [shares(order, 0, GroupRank(rank, replicas), batch) for rank in range(replicas)]
        for parts in zip(*ranks, strict=True):
            inputs, labels = samples.batch(torch.cat([share.indices for share in parts]))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return model
