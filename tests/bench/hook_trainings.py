"""The trainings of `tests.bench.hooks`, on one rank.

They show the accuracy of each hook after the same number of steps.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fedring.ctl.local.hook_steps import optimizer_for, sent_bytes
from fedring.ctl.local.rank import Rank
from fedring.ddp.hooks import hook_by_name
from fedring.offers import named
from fedring.train.batches import fetch, size_of
from fedring.train.losses import cross_entropy
from fedring.train.names.offered import collect
from fedring.train.names.seam import build_model

EPOCHS = 5
"""Into how many epochs the steps are divided; the warm-up of DGC is counted in them."""


def measure(
    rank: Rank, hooks: list[str], model: str, data: str, data_root: str | None, *, batch_size: int, steps: int,
    seeds: int, lr: float,
) -> list[dict[str, Any]]:  # fmt: skip
    """Train with each hook from each seed, with the same batches.

    Args:
        rank: Which rank this process is.
        hooks: The hooks by name.
        model: The function that makes the model, as module:name.
        data: The function that returns the samples, as module:name.
        data_root: Folder of the data sets.
        batch_size: Samples of a step of each rank.
        steps: Steps of each training.
        seeds: Trainings with each hook.
        lr: Learning rate, with momentum 0.9.

    Returns:
        For each hook, its name, the `accuracies` on the test samples, from 0 to 1, and the `bytes_per_step` that a
        rank sent in the mean over the training.
    """
    rank.join("fedring")
    split = collect(named(data=data)).get("data", data)(Path(data_root) if data_root else None, False)
    rows: list[dict[str, Any]] = []
    for number, hook in enumerate(hooks):
        accuracies, sent = [], sent_bytes()
        for seed in range(seeds):
            network = build_model(model, {}, seed, collect(named(model=model)))
            parallel = DistributedDataParallel(network)
            state, function = hook_by_name(hook, network.named_parameters())
            parallel.register_comm_hook(state, function)
            optimizer = optimizer_for(state, network.parameters(), lr)
            # The same for every hook, so that only the hooks differ, and another on each rank.
            generator = torch.Generator().manual_seed(1000 * seed + rank.number)
            cuts = [torch.randint(size_of(split.train), (batch_size,), generator=generator) for _ in range(steps)]
            for step, (inputs, labels) in enumerate(fetch(split.train, cuts, torch.device("cpu"))):
                if step * EPOCHS % steps < EPOCHS:
                    state.start_epoch(step * EPOCHS // steps)
                optimizer.zero_grad()
                torch.autograd.backward(cross_entropy(parallel(inputs), labels))
                state.end_step()
                optimizer.step()
            accuracies.append(accuracy_of(rank, network, split.test))
            rank.report(number * seeds + seed + 1, len(hooks) * seeds)
        per_step = rank.mean((sent_bytes() - sent) / (seeds * steps))
        rows.append({"hook": hook, "accuracies": accuracies, "bytes_per_step": round(per_step)})
    rank.leave()
    return rows


@torch.no_grad()
def accuracy_of(rank: Rank, model: nn.Module, samples: Any) -> float:
    """Return the share of the samples classified correctly.

    Each rank counts a part of them.
    """
    mine = torch.arange(size_of(samples))[rank.number :: rank.count]
    model.eval()
    correct = sum(
        int((model(inputs).argmax(1) == labels).sum())
        for inputs, labels in fetch(samples, torch.split(mine, 64), torch.device("cpu"))
    )
    return rank.mean(correct) * rank.count / size_of(samples)
