"""The parts of a job, loaded for one client."""

import logging
from dataclasses import replace
from typing import Any

import torch

from fedring.client.config import ClientConfig
from fedring.client.training.local_training import LoadedJob, loop_of
from fedring.data import ClientPart, Split, load_part, load_split, takes_part
from fedring.offers import PARTS
from fedring.train.errors import SeamError
from fedring.train.jobs.modes import MODES
from fedring.train.names.arguments import read_arguments
from fedring.train.names.offered import Offered
from fedring.train.names.seam import build_model, optimizer_factory
from fedring.train.tensors.skeleton import build_skeleton
from fedring.v1 import federation_pb2 as pb

log = logging.getLogger(__name__)


def load_own(job: pb.JobSpec, config: ClientConfig, offered: Offered, device: torch.device) -> LoadedJob:
    """Load everything that a job names, with a client's own samples.

    Workers of a group get those that they share.

    Args:
        job: The job.
        config: As for load_job; says also which part of the samples is the client's.
        offered: As for load_job.
        device: As for load_job.

    Raises:
        SeamError: As load_job does, and if the job's loop cannot train what was loaded.
        DataError: As load_job does.
    """
    part_of = ClientPart(config.partition_index, config.partition_count, config.client_id)
    whole = load_job(job, config, offered, device, part_of)
    if MODES[job.mode].staged:  # Its workers read the same samples.
        return whole
    split, shared = whole.split, MODES[job.mode].grouped
    if whole.divided:
        log.info("loaded %s samples of %s", _size(split.train), part_of)
        loop_of(job).check(whole, split.train, device)
        return whole
    part = load_part(
        split,
        "iid" if shared else job.partition or "none",
        index=config.partition_index,
        count=config.partition_count,
        alpha=job.alpha,
        seed=job.seed,
        alike=bool(job.personal),
    )
    if shared:  # Each worker of a group takes its share of all samples.
        part = Split(split.train, part.test, split.classes)
    log.info("loaded %s samples of the data set (partition_count=%s)", _size(part.train), config.partition_count)
    # Not with the part, whose first sample the server chooses.
    loop_of(job).check(whole, split.train, device)
    return replace(whole, split=part)


def load_job(
    job: pb.JobSpec, config: ClientConfig, offered: Offered, device: torch.device, part: ClientPart | None = None
) -> LoadedJob:
    """Load everything that a job names.

    The samples are those of all clients, unless the data callable takes a part.

    Args:
        job: The job.
        config: Says what is used instead of what the job names, and where data sets are.
        offered: What jobs may name here.
        device: Where the model is kept; the model of a pipeline stays without values.
        part: The client whose samples are loaded. Workers of a group share each batch, so they load all samples.

    Raises:
        SeamError: If a name is not offered, or the model cannot be built.
        DataError: If the samples cannot be loaded.
    """
    if job.mode not in MODES:
        raise SeamError("unknown_mode", f"This client does not know the mode {job.mode!r}: update it.")
    name = {part: getattr(config, part) or getattr(job, part) for part in PARTS}
    data = offered.get("data", name["data"])
    arguments = (*model_of(job, config), offered)
    # No worker of a pipeline has the memory for all stages.
    model = build_skeleton(*arguments) if MODES[job.mode].staged else build_model(*arguments).to(device)
    return LoadedJob(
        model,
        load_split(data, config.data_root, config.download, None if MODES[job.mode].grouped else part),
        offered.get("loss", name["loss"]),
        optimizer_factory(name["optimizer"], read_arguments(job.optimizer_args), offered),
        offered.get("trainer", name["trainer"]) if name["trainer"] else None,
        offered.get("evaluator", name["evaluator"]) if name["evaluator"] else None,
        divided=takes_part(data) and not MODES[job.mode].grouped,
    )


def model_of(job: pb.JobSpec, config: ClientConfig) -> tuple[str, dict[str, Any], int]:
    """Return the name, the arguments and the seed of the job's model."""
    return config.model or job.model, read_arguments(job.model_args), job.seed


def _size(samples: Any) -> int:
    return len(samples)
