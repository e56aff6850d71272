"""Collectives and trainings on a GPU, which all ranks share."""

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.system.ring_scripts import exchanges, twin


def all_checks(rank: int, size: int) -> list[str]:
    """Run every check of collectives with tensors on the GPU, and return their names."""
    torch.set_default_device("cuda")
    warnings.filterwarnings("ignore", "Sparse invariant checks")  # said by torch 2.11, although the call asks for them
    return exchanges.all_checks(rank, size)


def trainings(rank: int, size: int, *, hooks: list[str]) -> dict[str, Any]:
    """Train on the host and on the GPU with each hook, and return the parameters of both."""
    # Said by torch 2.11 in a backward pass whose thread has no context yet; it makes one.
    warnings.filterwarnings("ignore", "Attempting to run cuBLAS")
    return {hook: [twin.train(rank, hook, device, device) for device in ("cpu", "cuda:0")] for hook in hooks}


def norms(rank: int, size: int) -> dict[str, list[float]]:
    """Return a batch's values after SyncBatchNorm, and after BatchNorm over the batches of all ranks."""
    own = torch.randn(5, 4, generator=torch.Generator().manual_seed(rank)).cuda()
    everyone = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(everyone, own)
    layer = nn.BatchNorm1d(4).cuda()
    synced = nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(4)).cuda()  # type: ignore[no-untyped-call]  # torch's
    whole = layer(torch.cat(everyone))[rank * 5 : rank * 5 + 5]
    return {"synced": synced(own).flatten().tolist(), "whole": whole.flatten().tolist()}
