"""The server's own update of a round, for the rule fltrust.

The server trains on samples of its own, as a client does. The update depends on the base model, the job, the samples
and the round's seed only. So a server that is started again, and a simulation, make the same one.
"""

import json
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from fedring.codec import Encoding, encode
from fedring.codec.schema import Schema, Vectors
from fedring.data import DataError, load_split
from fedring.job_code import job_code
from fedring.server.aggregation.contributions import Contribution
from fedring.server.aggregation.rule import RuleError
from fedring.server.state.rows import lay_out
from fedring.train.batches import size_of
from fedring.train.device import pick_device
from fedring.train.errors import SeamError, TrainError, failure_detail
from fedring.train.jobs.job import Job
from fedring.train.loop import seeded, train
from fedring.train.names.offered import Offered
from fedring.train.names.seam import optimizer_factory
from fedring.train.plan import Plan
from fedring.train.tensors.state import read_vectors, schema_of, write_vectors
from fedring.train.user_trainer import run_trainer


class OwnUpdates:
    """Makes the server's own updates.

    It keeps the samples of one job in memory. It is not for the event loop.
    """

    def __init__(self, data_root: Path | None, offered: Offered) -> None:
        self._data_root, self._offered = data_root, offered
        self._loaded: tuple[str, Dataset[object]] | None = None  # what was loaded, and the samples

    def load(self, job: Job) -> Dataset[object]:
        """Return the server's own samples for a job.

        The job's table [aggregation] names them.

        Raises:
            SeamError: if the function is not offered.
            DataError: if it cannot load the samples, or if there are none.
        """
        table = job.aggregation
        key = json.dumps([table.data, table.args, job.seed])
        if self._loaded is None or self._loaded[0] != key:
            load = self._offered.get("data", table.data, table.args)
            with seeded(job.seed, torch.device("cpu")):  # so that a function that draws samples draws the same ones
                samples = load_split(load, self._data_root, False).train
            if not _size(samples):
                raise DataError("no_data", f"{table.data} returned no training samples: fltrust needs some.")
            self._loaded = key, samples
        return self._loaded[1]

    def make(
        self, model: nn.Module, schema: Schema, base: Vectors, job: Job, *, job_round: int, seed: int
    ) -> Contribution:
        """Train as a client would, and return the difference.

        The difference is to the base model of the round.

        Args:
            model: the job's model, newly built; it is trained in place.
            schema: what the job shares of it.
            base: the values of that in the round's base model.
            job: has the settings of the training.
            job_round: the number of the round within the job.
            seed: of the round.

        Raises:
            SeamError: if the samples, the loss, the optimizer or the trainer is not offered.
            RuleError: "no_server_update", if there are no samples, or the training fails: the user's code may raise
                anything.
        """
        write_vectors(model, schema, base, partial=True)
        try:
            with job_code():
                _train(model, self.load(job), job, job_round=job_round, seed=seed, offered=self._offered)
            if clause := schema.difference(schema_of(model, schema.names)):
                raise TrainError("wrong_schema", f"its trainer has changed the model: {clause}")
            delta = read_vectors(model, schema.names).parameters - base.parameters
        except SeamError:
            raise
        except Exception as error:  # the user's code may raise anything
            detail = failure_detail(error).rstrip(".")
            raise RuleError("no_server_update", f"the server cannot train: {detail}") from error
        if not np.isfinite(delta).all():
            raise RuleError("no_server_update", "the server's own update has a value that is not finite")
        payload = encode(delta, Encoding("fp32"))
        packets = lay_out([("parameters", "delta", "fp32", len(payload))])
        return Contribution("", 1.0, packets, lambda offset, size: payload[offset : offset + size])


def _train(
    model: nn.Module, samples: Dataset[object], job: Job, *, job_round: int, seed: int, offered: Offered
) -> None:
    settings, device = job.settings_of(job_round), pick_device("auto")
    plan = Plan(
        epochs=settings.epochs,
        batch_size=job.batch_size,
        lr=settings.lr,
        momentum=job.momentum,
        mu=job.mu,
        subset_size=settings.subset_size,
        seed=seed,
        job_round=job_round,
        clip_norm=job.clip_norm,
        precision=job.precision,
    )
    if job.trainer:
        run_trainer(offered.get("trainer", job.trainer), model, samples, plan, device=device)
    else:
        factory = optimizer_factory(job.optimizer, job.optimizer_args, offered)
        loss = offered.get("loss", job.loss)
        train(model.to(device), samples, plan, loss=loss, optimizer_factory=factory, device=device)


def _size(samples: Dataset[object]) -> int:
    try:
        return size_of(samples)
    except TrainError as error:
        raise DataError(error.reason, str(error)) from error
