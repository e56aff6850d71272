"""The models of jobs, built to learn their parts."""

import json
import threading

from torch import nn

from fedring.codec.schema import Schema
from fedring.server.state.rows import ModelRow
from fedring.train.errors import SeamError
from fedring.train.jobs.job import Job
from fedring.train.names.offered import Offered
from fedring.train.names.seam import build_model
from fedring.train.tensors.sharing import Sharing
from fedring.train.tensors.skeleton import build_skeleton, check_can_initialize
from fedring.train.tensors.state import Parts, check_sharing, frozen_digest, split

SEEDED = threading.RLock()
"""Held by a thread that seeds torch's process-wide generator, and then draws from it."""


class JobModels:
    """Builds the models of jobs, and remembers their parts.

    All methods may take long.

    Args:
        offered: what jobs may name here.
    """

    def __init__(self, offered: Offered) -> None:
        self._offered = offered
        self._built: dict[str, Parts] = {}  # by what a job says about its model

    def build(self, job: Job) -> tuple[nn.Module, Parts]:
        """Return the job's model, newly built, and its parts.

        Raises:
            SeamError: as for schema_of().
        """
        with SEEDED:
            model = build_model(job.model, job.model_args, job.seed, self._offered)
        parts = self._built[_kind(job)] = check_sharing(model, job.sharing)
        return model, parts

    def skeleton(self, job: Job) -> tuple[nn.Module, Parts]:
        """Return the model of a pipeline job without values, and its parts.

        Raises:
            SeamError: as for schema_of().
        """
        with SEEDED:
            model = build_skeleton(job.model, job.model_args, job.seed, self._offered)
        if job.training.by_module:
            check_can_initialize(model)
        parts = self._built[_kind(job)] = split(model, Sharing())
        return model, parts

    def schema_of(self, job: Job) -> Schema:
        """Return the schema of the job's shared tensors.

        The model is built only if it was not built before.

        Raises:
            SeamError: if the model cannot be built, or not in the way that a pipeline job asks for; "bad_sharing", with
                a text that begins with the key, if `shared` or `private` does not fit the model.
        """
        return self._parts_of(job).shared

    def frozen_digest(self, job: Job, base: ModelRow) -> str:
        """Return the digest of the tensors frozen on all sides.

        Empty if there are none.

        Args:
            job: the job.
            base: a version that it continues. Those of an older server hold the frozen tensors, too.

        Raises:
            SeamError: as for schema_of(), or "wrong_base", if the version was trained with other frozen tensors. What
                an earlier release has trained does not say with which.
        """
        parts = self._parts_of(job)
        if not parts.frozen.entries or parts.shared.hash.hex() != base.schema_hash:
            return ""
        digest = frozen_digest(self.build(job)[0], parts.frozen)  # the values depend on the seed
        if base.frozen_digest not in ("", digest):
            raise SeamError(
                "wrong_base",
                f"version {base.version} was trained with other values of the {len(parts.frozen.entries)} frozen "
                'tensors than the job\'s model has: let its callable load the same base, or use start = "fresh".',
            )
        return digest

    def check_fits(self, row: ModelRow, job: Job) -> None:
        """Return if a version is of the job's kind.

        Raises:
            SeamError: "wrong_schema" if it is not, another reason if the job's model cannot be built.
        """
        if self.schema_of(job).hash.hex() != row.schema_hash:
            raise SeamError("wrong_schema", f"Version {row.version} is not a model of the job's kind: see `start`.")

    def _parts_of(self, job: Job) -> Parts:
        if (known := self._built.get(_kind(job))) is not None:
            return known
        return self.skeleton(job)[1] if job.training.staged else self.build(job)[1]


def _kind(job: Job) -> str:
    sharing = job.sharing
    return json.dumps(
        [
            *(job.model, job.model_args, job.training.staged and job.pipeline.first_model),
            *(sharing.shared, sharing.private, sharing.frozen_stay),
        ]
    )
