"""Stages with several workers each.

They add up their gradients before an update, and share the buffers of replica 0.

Each replica does its own micro-batches, so the running averages of BatchNorm differ from replica to replica. As in
DistributedDataParallel, those of replica 0 are the stage's: an evaluation uses them on all replicas, and a checkpoint
has them.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fedring.pipeline.errors import PipelineError
from fedring.schedules.schedule import Schedule


def stage_group(schedule: Schedule, group: dist.ProcessGroup | None = None) -> dist.ProcessGroup | None:
    """Make the groups of stages with several workers.

    Returns the group that this rank belongs to.

    Every rank of the default group must call this, at the same time as all others.

    Args:
        schedule: Its worker w is rank w of the group.
        group: The group of the pipeline; None means the default group.

    Returns:
        The group of this rank's stage; None if the stage has one worker.
    """
    ranks, rank = dist.get_process_group_ranks(group or dist.group.WORLD), dist.get_rank()
    mine: dist.ProcessGroup | None = None
    for stage in range(schedule.stages):
        members = [ranks[worker] for worker in schedule.owners(stage)]
        if len(members) == 1:
            continue
        # Every rank makes every group, in the same order, as torch.distributed requires also of ranks that are not
        # members.
        made = dist.new_group(members)
        if rank in members:
            if not isinstance(made, dist.ProcessGroup):
                raise PipelineError(f"rank {rank} is no member of the group of stage {stage} that was made for it")
            mine = made
    return mine


def add_up(gradients: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Sum gradients over the replicas of a stage, in place.

    Sums, and not means: the loss of each micro-batch is already weighted by its share of the batch.
    """
    for same in _by_kind(gradients):
        flat = torch.cat([gradient.reshape(-1) for gradient in same]).cpu()
        dist.all_reduce(flat, group=group)
        _scatter(flat, same)


@torch.no_grad()
def share_buffers(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Give all replicas of a stage the buffers of replica 0."""
    for same in _by_kind(list(module.buffers())):
        flat = torch.cat([buffer.reshape(-1) for buffer in same]).cpu()
        dist.broadcast(flat, dist.get_global_rank(group, 0), group=group)
        _scatter(flat, same)


def _by_kind(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the tensors in lists of one dtype and one device each."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(kinds.values())


def _scatter(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view_as(tensor))
