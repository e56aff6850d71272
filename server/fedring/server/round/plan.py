"""Translation of a job into machine rules and a round's command."""

from fedring.server.group import machine as groups
from fedring.server.round.events import RoundRules
from fedring.server.state.rows import ModelRow, RoundRow
from fedring.train.jobs.job import Job
from fedring.train.orders.commands import job_spec, train_cmd
from fedring.v1 import federation_pb2 as pb


def rules_of(job: Job, *, grace: float) -> RoundRules:
    """Return the rules of each round of the job.

    Args:
        job: the job. If its clients train as a group, one worker delivers for all.
        grace: seconds that a lost client has to come back.
    """
    alone = job.training.grouped
    fixed = job.training.workers
    return RoundRules(
        labels=job.clients,
        min_clients=max(job.min_clients, fixed),
        barrier=job.barrier,
        barrier_timeout=job.barrier_timeout_seconds,
        approval_timeout=job.approval_timeout_seconds,
        sample_ratio=job.sample_ratio,
        sample_clients=fixed or job.sample_clients,
        select_factor=1.0 if alone else job.select_factor,
        min_to_aggregate=1 if alone else job.min_clients_to_aggregate,
        close_at_minimum=alone or job.close_at_minimum,
        deadline=job.deadline_seconds,
        grace=grace,
        # The workers of a group wait for each other, so one that is slow or stands still holds up all of them.
        # A trainer of the user's own cannot report how far it is.
        stalled_after=0.0 if alone or job.trainer else job.stalled_after_seconds,
        straggler_factor=0.0 if alone else job.straggler_factor,
        evaluate_timeout=job.evaluate_seconds,
        seed=job.seed,
    )


def group_rules(job: Job, *, target: int) -> groups.GroupRules:
    """Return the rules of the groups of a round with `target` clients.

    A pipeline runs only if it is whole.
    """
    mode = job.training
    target = mode.workers or target
    minimum = mode.workers or min(target, job.min_clients_to_aggregate)
    return groups.GroupRules(target=target, minimum=minimum, patience=mode.patience, whole=mode.staged)


def round_command(job: Job, row: RoundRow, base: ModelRow, *, run_id: str, epoch: int, most_bytes: int) -> pb.TrainCmd:
    """Return a round's command, before the job's transforms add to it.

    It has no deadline, which depends on the moment of sending.
    """
    command = train_cmd(job, job_spec(job, row.job_id), number=row.round, job_round=row.job_round)
    command.run_id, command.epoch = run_id, epoch
    command.model_version, command.model_digest = base.version, base.digest
    command.schema_hash = bytes.fromhex(base.schema_hash)
    command.max_update_bytes = most_bytes or 2 * base.bytes + (1 << 20)
    return command
