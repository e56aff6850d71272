"""Translation of a job into machine rules and wire messages."""

import json
from dataclasses import asdict
from typing import Any, get_args

from pydantic import BaseModel

from fedring.codec.encoding import Encoding
from fedring.server.group import machine as groups
from fedring.server.round.events import RoundRules
from fedring.server.state.rows import ModelRow, RoundRow
from fedring.train.jobs.job import Job
from fedring.v1 import federation_pb2 as pb

_ON_WIRE = set(pb.JobSpec.DESCRIPTOR.fields_by_name) - set(get_args(Job.model_fields["mode"].annotation))
"""The fields of a job that clients know, whatever its mode."""


def rules_of(job: Job, *, grace: float) -> RoundRules:
    """Return the rules of each round of the job.

    Args:
        job: the job. If its clients train as a group, one worker delivers for all.
        grace: seconds that a lost client has to come back.
    """
    alone = job.grouped
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


def job_spec(job: Job, job_id: int) -> pb.JobSpec:
    """Return the part of a job that clients need."""
    return pb.JobSpec(
        job_id=job_id,
        name=job.name,
        mode=job.mode,
        rounds=job.rounds,
        model=job.model,
        model_args=json.dumps(job.model_args),
        data=job.data,
        loss=job.loss,
        optimizer=job.optimizer,
        optimizer_args=json.dumps(job.optimizer_args) if job.optimizer_args else "",
        trainer=job.trainer,
        evaluator=job.evaluator,
        partition=job.partition,
        alpha=job.alpha,
        seed=job.seed,
        shared=job.shared,
        private=job.private,
        transforms=json.dumps([each.model_dump() for each in job.transforms]) if job.transforms else "",
        min_results=job.min_clients_to_aggregate,
        **_tables(job),
    )


def _tables(job: Job) -> dict[str, str]:
    """Return the tables of a job for its clients, as JSON.

    Of the tables for a mode, only that of the job's own mode.
    """
    tables = {key: table for key, table in job if isinstance(table, BaseModel) and key in _ON_WIRE}
    if job.grouped:
        tables[job.mode] = job.training
    return {key: table.model_dump_json() for key, table in tables.items()}


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


def train_cmd(job: Job, spec: pb.JobSpec, *, number: int, job_round: int) -> pb.TrainCmd:
    """Return a round's command, without its model and its deadline."""
    # A group sends its result only once, so it need not be made smaller.
    encoding = Encoding("fp32") if job.grouped else job.upload_encoding
    return pb.TrainCmd(
        round=number,
        job_round=job_round,
        job=spec,
        seed=job.seed * 1_000_003 + job_round,
        without_evaluation=not job.evaluate,
        encoding=pb.Encoding(**asdict(encoding)),
        **_training(job, job_round),
    )


def client_command(command: pb.TrainCmd, job: Job) -> pb.TrainCmd:
    """Return the command for a client with a job of its own.

    Args:
        command: of the round.
        job: the client's (`fedring.train.jobs.override_table.with_overrides`).
    """
    told = pb.TrainCmd()
    told.CopyFrom(command)
    for key, value in _training(job, command.job_round).items():
        setattr(told, key, value)
    return told


def _training(job: Job, job_round: int) -> dict[str, Any]:
    """Return the fields of a command that say how a client trains.

    They are the keys of `fedring.train.jobs.override_table.Override`.
    """
    settings = job.settings_of(job_round)
    return {
        "subset_size": settings.subset_size,
        "epochs": settings.epochs,
        "batch_size": job.batch_size,
        "lr": settings.lr,
        "momentum": job.momentum,
        "mu": job.mu,
        "clip_norm": job.clip_norm,
        "precision": job.precision,
    }
