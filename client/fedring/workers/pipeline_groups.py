"""The process groups of a pipeline job.

There is one for each parallel pipeline, and one for the workers of each stage.
"""

import torch.distributed as dist

from fedring.pipeline.replicas import stage_group
from fedring.schedules.schedule import Schedule
from fedring.train.jobs.pipeline_table import Pipeline


def groups_of(table: Pipeline, schedule: Schedule) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Return the groups of this worker's pipeline and stages.

    A single pipeline is the default group, which is returned as None. So is the second group if no other worker has the
    same stages.
    """
    if table.pipelines == 1:
        return None, stage_group(schedule)
    rank, width = dist.get_rank(), table.width
    # Every rank must make every group, in the same order.
    pipelines = [dist.new_group(list(range(first, first + width))) for first in range(0, table.workers, width)]
    same_stages = [dist.new_group(list(range(index, table.workers, width))) for index in range(width)]
    pipeline, stage = pipelines[rank // width], same_stages[rank % width]
    if not isinstance(pipeline, dist.ProcessGroup) or not isinstance(stage, dist.ProcessGroup):
        raise RuntimeError(f"rank {rank} is not a member of the groups that were made for it")
    return pipeline, stage
