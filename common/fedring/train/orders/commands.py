"""The wire messages that follow from a job."""

import json
from dataclasses import asdict
from typing import Any, get_args

from pydantic import BaseModel

from fedring.codec.encoding import Encoding
from fedring.train.jobs.job import Job
from fedring.train.jobs.job_table import JobTable
from fedring.v1 import federation_pb2 as pb

_ON_WIRE = set(pb.JobSpec.DESCRIPTOR.fields_by_name) - set(get_args(Job.model_fields["mode"].annotation))
"""The fields of a job that clients know, whatever its mode."""

TABLES = frozenset(
    key
    for key, field in Job.model_fields.items()
    for kind in (field.annotation, *get_args(field.annotation))
    if key in pb.JobSpec.DESCRIPTOR.fields_by_name and isinstance(kind, type) and issubclass(kind, JobTable)
)
"""The tables of algorithms that clients know, which travel as JSON."""


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


def _tables(job: Job) -> dict[str, Any]:
    """Return the tables of a job for its clients, as JSON.

    Of the tables for a mode, only that of the job's own mode.
    """
    tables = {key: table for key, table in job if isinstance(table, BaseModel) and key in _ON_WIRE}
    if job.training.grouped:
        tables[job.mode] = job.training
    return {key: table.model_dump_json() for key, table in tables.items()}


def train_cmd(job: Job, spec: pb.JobSpec, *, number: int, job_round: int) -> pb.TrainCmd:
    """Return a round's command, without its model and its deadline."""
    # A group sends its result only once, so it need not be made smaller.
    whole = job.training.grouped
    encoding = Encoding("fp32") if whole else Encoding(job.encoding, job.chunk, job.keep_ratio, job.step)
    return pb.TrainCmd(
        round=number,
        job_round=job_round,
        job=spec,
        seed=job.seed * 1_000_003 + job_round,
        without_evaluation=not job.evaluate,
        encoding=pb.Encoding(**asdict(encoding)),
        **training_of(job, job_round),
    )


def client_command(command: pb.TrainCmd, job: Job) -> pb.TrainCmd:
    """Return the command for a client with a job of its own.

    Args:
        command: of the round.
        job: the client's (`fedring.train.jobs.override_table.with_overrides`).
    """
    told = pb.TrainCmd()
    told.CopyFrom(command)
    for key, value in training_of(job, command.job_round).items():
        setattr(told, key, value)
    return told


def training_of(job: Job, job_round: int) -> dict[str, Any]:
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
