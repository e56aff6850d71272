"""Commands of jobs whose updates are opened only as sums.

These jobs have the table [secure_aggregation].
"""

from fedring.secure.masks import MASKED
from fedring.train.jobs.job import Job
from fedring.v1 import federation_pb2 as pb
from fedring.v1 import secure_pb2 as wire


def secure_settings(job: Job) -> wire.SecureRound:
    """Return the fields of secure aggregation that follow from a job.

    Without [dp], the steps of the levels and the blocks that are sent follow from past rounds, too.
    """
    table = job.secure_aggregation
    if table is None:
        raise ValueError("the job has no secure aggregation")
    if job.dp is not None:
        return wire.SecureRound(clip=job.dp.clip)  # the rest follows from the job and the group
    return wire.SecureRound(
        block=table.block,
        levels=table.levels,
        max_weight=min(job.max_samples, table.max_weight) if job.weights == "samples" else 0,
        clip=job.update_clip,
    )


def add_sums(job: Job, expected: pb.TrainCmd, told: pb.TrainCmd) -> None:
    """Complete the command of a job, if only sums are opened.

    Args:
        job: The job.
        expected: The command.
        told: That of the server, which alone knows the past rounds.
    """
    if job.secure_aggregation is None:
        return
    expected.encoding.name = MASKED
    expected.secure.CopyFrom(secure_settings(job))
    if job.dp is None:
        expected.secure.scales, expected.secure.blocks = told.secure.scales, told.secure.blocks
