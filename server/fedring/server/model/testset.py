"""The server's own evaluation of models.

It uses the whole test set of a job.
"""

import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from fedring.data import DataError, load_split
from fedring.job_code import job_code
from fedring.server.aggregation.modelfile import ModelReader
from fedring.server.model.job_models import SEEDED
from fedring.server.state.blob_interfaces import Blobs
from fedring.server.state.checked import CheckedReader
from fedring.server.state.rows import ModelRow
from fedring.train.device import pick_device
from fedring.train.errors import SeamError, failure_detail
from fedring.train.evaluation import Counts, Evaluator, run_evaluator
from fedring.train.jobs.job import Job
from fedring.train.names.offered import Offered
from fedring.train.names.seam import build_model
from fedring.train.tensors.state import write_vectors

log = logging.getLogger(__name__)


class EvaluationFailed(Exception):
    """The server cannot evaluate a model.

    The text is a sentence for operators.
    """


@dataclass(frozen=True, slots=True)
class _Loaded:
    job: Job
    model: nn.Module
    samples: Any
    loss: Any
    evaluator: Evaluator | None  # None = the built-in evaluation


class TestSet:
    """Evaluates models on a job's test set.

    It keeps the model and the samples of one job in memory, for each thread that evaluates: jobs that run at once have
    threads of their own. It is not for the event loop.
    """

    def __init__(self, blobs: Blobs, data_root: Path | None, offered: Offered) -> None:
        self._blobs, self._data_root, self._offered = blobs, data_root, offered
        self._kept = threading.local()

    def evaluate(self, row: ModelRow, job: Job) -> Counts:
        """Evaluate a version on the job's test samples.

        Tensors that are not shared have their first values.

        Raises:
            EvaluationFailed: with a line in the log, if that fails: the user's code may raise anything.
        """
        try:
            with job_code():
                loaded = self.load(job)
                with self._blobs.reader(row.blob) as blob:
                    checked = CheckedReader(blob.read, blob.size, row.blob)
                    reader = ModelReader(checked)
                    write_vectors(loaded.model, reader.schema, reader.vectors(), partial=True)
                    checked.check()
                device = pick_device("auto")
                counts = run_evaluator(loaded.evaluator, loaded.model, loaded.samples, loss=loaded.loss, device=device)
        except Exception as error:  # the user's model and loss may raise anything, and the round has published
            log.exception("the server could not evaluate model %d", row.version)
            raise EvaluationFailed(failure_detail(error)) from None
        if not counts.total:
            raise EvaluationFailed("There are no test samples here: let the job's data have some on the server, too.")
        return counts

    def load(self, job: Job) -> _Loaded:
        """Load a job's model, data and functions, unless loaded already.

        Raises:
            SeamError: if the model, the data, the loss or the evaluator is not offered, or the data cannot be loaded.
        """
        loaded: _Loaded | None = getattr(self._kept, "loaded", None)
        if loaded is None or _parts_of(loaded.job) != _parts_of(job):
            loaded = self._kept.loaded = self._load(job)
        return loaded

    def _load(self, job: Job) -> _Loaded:
        offered = self._offered
        with SEEDED:
            model = build_model(job.model, job.model_args, job.seed, offered)
        data, loss = offered.get("data", job.data), offered.get("loss", job.loss)
        evaluator = offered.get("evaluator", job.evaluator) if job.evaluator else None
        try:
            samples = load_split(data, self._data_root, False).test
        except DataError as error:
            raise SeamError(error.reason, str(error)) from error
        return _Loaded(job, model, samples, loss, evaluator)


def _parts_of(job: Job) -> tuple[object, ...]:
    """Return the job's settings that an evaluation depends on.

    The rounds of a job may differ in other settings.
    """
    return job.model, job.model_args, job.seed, job.data, job.loss, job.evaluator
