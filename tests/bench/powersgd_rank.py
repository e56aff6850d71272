"""Measure what the rank and the start of PowerSGD do to the accuracy, on two workers and the digits.

python -m tests.bench.powersgd_rank [--steps N] [--lr LR] [--hooks HOOK,...] prints one JSON line for each hook, with
the accuracies of three seeds after the same number of steps.
"""

import argparse
import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from fedring.data.images import digits
from fedring.ddp.hooks import hook_by_name
from fedring.train.hooks import split_hooks
from fedring.train.models import digits_mlp
from tests.system.ring_scripts import ranks

SEEDS = (0, 1, 2)
RANKS = (1, 2, 4, 8)
STARTS = (20, 50, 100)  # steps; without one it is 2
HOOKS = [
    "none",
    *(f"batched_powersgd(matrix_approximation_rank={rank})" for rank in RANKS),
    *(f"powersgd(matrix_approximation_rank={rank})" for rank in RANKS),
    *(f"batched_powersgd(matrix_approximation_rank=1,start_powerSGD_iter={start})" for start in STARTS),
    *(f"powersgd(matrix_approximation_rank=1,start_powerSGD_iter={start})" for start in STARTS),
]
BATCH = 32  # of one worker


def accuracy(model: nn.Module) -> float:
    """Return the share of the test samples that the model classifies correctly."""
    images, labels = next(iter(DataLoader(digits().test, batch_size=10_000)))
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())


def train(rank: int, size: int, *, hook: str, steps: int, lr: float) -> list[float]:
    """Train on this rank's half of each batch, with each seed; return the accuracies."""
    results = []
    images, labels = next(iter(DataLoader(digits().train, batch_size=10_000)))
    for seed in SEEDS:
        torch.manual_seed(seed)
        model = digits_mlp(hidden=128, layers=2)
        parallel = DistributedDataParallel(model)
        state: Any
        state, function = hook_by_name(hook, model.named_parameters())
        parallel.register_comm_hook(state, function)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        for _ in range(steps):
            mine = torch.randint(0, len(images), (size, BATCH))[rank]
            optimizer.zero_grad()
            torch.autograd.backward(functional.cross_entropy(parallel(images[mine]), labels[mine]))
            optimizer.step()
        results.append(accuracy(model))
    return results


def main() -> None:
    """Print a line for each hook."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--hooks", type=split_hooks, default=HOOKS)
    options = parser.parse_args()
    for hook in options.hooks:
        with tempfile.TemporaryDirectory() as folder:
            body = partial(train, hook=hook, steps=options.steps, lr=options.lr)
            accuracies = ranks.run(body, 2, Path(folder))[0]
        print(json.dumps({"hook": hook, "accuracies": [round(value, 4) for value in accuracies]}), flush=True)


if __name__ == "__main__":
    main()
