"""A client's own model: its training, and the report of its evaluation.

Ditto (Li et al. 2021, algorithm 1): with the round's model w, the client's own model v minimises the client's loss plus
(mu / 2) |v - w|^2, and continues from round to round. Fine-tuning begins with w in each round.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import islice
from math import isfinite
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.utils.data import Dataset

from fedring.codec.schema import Schema
from fedring.job_code import job_code
from fedring.train.errors import SeamError, TrainingStopped
from fedring.train.evaluation import Counts
from fedring.train.jobs.personal_table import Personal
from fedring.train.loop import Loss, OptimizerFactory, train
from fedring.train.metrics import MAX_METRICS
from fedring.train.plan import Plan
from fedring.train.tensors.state import read_tensors, write_tensors
from fedring.v1 import federation_pb2 as pb

log = logging.getLogger(__name__)


def train_own(
    model: nn.Module,
    samples: Dataset[Any],
    plan: Plan,
    how: Personal,
    *,
    loss: Loss,
    optimizer_factory: OptimizerFactory,
    schema: Schema,
    start: Mapping[str, Tensor] | None,
    device: torch.device,
    progress: Callable[[float], None] = lambda share: None,
    stopped: Callable[[], bool] = lambda: False,
) -> dict[str, Tensor] | None:
    """Train a client's own model.

    Its failure does not fail the round: the client keeps the own model that it had. No noise covers this training, so
    its end must not decide what the server gets.

    Args:
        model: Holds the values that the round starts from, and holds them again afterwards.
        samples: The samples of the client.
        plan: How the job wants the round's model trained.
        how: How the client's own model is trained.
        loss: As for `fedring.train.loop.train`.
        optimizer_factory: As for `fedring.train.loop.train`.
        schema: The tensors that are the client's own: all that training may change.
        start: The tensors after the client's last round; None = there was none, or they do not count.
        device: Where to train.
        progress: As for `fedring.train.loop.train`.
        stopped: As for `fedring.train.loop.train`.

    Returns:
        The tensors by name, on the CPU; None if the training failed.

    Raises:
        TrainingStopped: If `stopped` returned True.
    """
    rounds_model = read_tensors(model, schema.names)
    if start is not None and how.method == "ditto":
        write_tensors(model, start)
    try:
        with job_code():
            train(
                model,
                samples,
                replace(plan, epochs=how.epochs, mu=how.mu),
                loss=loss,
                optimizer_factory=optimizer_factory,
                device=device,
                progress=progress,
                stopped=stopped,
                towards=rounds_model,
            )
        own = read_tensors(model, schema.names)
    except TrainingStopped:
        raise
    except Exception as error:  # the user's code may raise anything
        log.warning("the training of this client's own model failed: it keeps the one that it had", exc_info=error)
        return None
    finally:
        write_tensors(model, rounds_model)
    if own and all(torch.isfinite(tensor).all() for tensor in own.values()):
        return own
    log.warning("the training of this client's own model diverged: it keeps the one that it had")
    return None


def personal_of(job: pb.JobSpec) -> Personal:
    """Return how a job wants clients to train models of their own.

    Raises:
        SeamError: With the reason bad_job, if this client does not understand it.
    """
    try:
        return Personal.model_validate_json(job.personal)
    except ValidationError as error:
        raise SeamError(
            "bad_job", f"This client does not understand the job's [personal]: update it. {error}"
        ) from error


def with_own(counts: Counts, own: Counts) -> Counts:
    """Return the round model's counts with the own model's metrics added.

    If there are too many metrics, those of the own model come first.
    """
    figures = figures_of(own)
    others = {name: value for name, value in counts.metrics.items() if name not in figures}
    metrics = figures | dict(islice(others.items(), MAX_METRICS - len(figures)))
    return replace(counts, metrics=metrics, warnings=tuple(dict.fromkeys(counts.warnings + own.warnings)))


def figures_of(own: Counts) -> dict[str, float]:
    """Return the metrics of a client's own model, by name."""
    figures = {"accuracy_personal": own.accuracy, "loss_personal": own.loss}
    return {name: value for name, value in figures.items() if value is not None and isfinite(value)}
