"""Evaluation of one model by all workers of a process group.

Each worker evaluates it on its share of the samples.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from fedring.ddp.exchange import device_of
from fedring.train.batches import size_of
from fedring.train.evaluation import Counts, evaluate
from fedring.train.loop import Loss
from fedring.train.losses import cross_entropy


@torch.no_grad()
def evaluate_together(
    model: nn.Module,
    samples: Dataset[Any],
    *,
    loss: Loss = cross_entropy,
    batch_size: int = 64,
    group: dist.ProcessGroup | None = None,
) -> Counts:
    """Evaluate a model with all workers of a group.

    Each sample counts once, whatever the number of workers is.

    Every worker of the group must call this. The model is in evaluation mode meanwhile, and has the buffers (BatchNorm)
    of the group's first worker, as the model that this worker would save.

    Args:
        model: The model, or the DistributedDataParallel around it; its parameters are equal on all workers.
        samples: A map-style dataset of pairs of an input and a label, the same on all workers.
        loss: Returns the mean loss of a batch.
        batch_size: Samples per batch of one worker.
        group: The workers; None is the default group.

    Returns:
        The counts over all samples, equal on all workers, with `accuracy` and `loss`.

    Raises:
        ValueError: If there is no process group, or if this worker is not in it.
    """
    group = group or dist.group.WORLD
    if group is None or not isinstance(group, dist.ProcessGroup):
        raise ValueError("evaluate_together needs a process group: call torch.distributed.init_process_group first")
    module = model.module if isinstance(model, DistributedDataParallel) else model
    device = next((tensor.device for tensor in module.parameters()), torch.device("cpu"))
    mine = torch.arange(group.rank(), size_of(samples), group.size(), device="cpu")
    before = [buffer.clone() for buffer in module.buffers()]
    first = dist.get_process_group_ranks(group)[0]
    try:
        for buffer in module.buffers():
            dist.broadcast(buffer, first, group=group)
        counts = evaluate(module, samples, loss=loss, batch_size=batch_size, device=device, indices=mine)
    finally:
        for buffer, own in zip(module.buffers(), before, strict=True):
            buffer.copy_(own)
    # Sums travel as float64, which holds every count exactly. A worker without samples does not know whether the model
    # has classes, so that is decided by the others.
    row = [counts.correct or 0, counts.total, counts.loss_sum, int(counts.total > 0 and counts.correct is None)]
    sums = torch.tensor(row, dtype=torch.float64, device=device_of(group))
    dist.all_reduce(sums, group=group)
    correct, total, loss_sum, without_classes = sums.tolist()
    return Counts(None if without_classes else int(correct), int(total), loss_sum)
