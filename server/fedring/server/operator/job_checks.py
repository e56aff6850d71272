"""Checks of a job before it runs, with the server's knowledge.

They ask whether the job's parts exist and fit, and whether it can ever start.

What only clients have, such as a module of their own, is found out when the job runs.
"""

from collections.abc import Iterator, Sequence
from difflib import get_close_matches

import torch
from torch import nn

from fedring.codec.schema import Schema
from fedring.daemon.checks import Level, check_data_root
from fedring.daemon.config import ConfigError
from fedring.data import DataError
from fedring.offers import Kind
from fedring.server.aggregation.strategy import Strategy, make_strategy
from fedring.server.config import ServerConfig
from fedring.server.model.making import ModelMaker
from fedring.server.model.transforms.listing import Transforms, transforms_of
from fedring.server.state.ratings import best_of
from fedring.server.state.rows import ModelRow
from fedring.train.dgc_optimizer import make_optimizer
from fedring.train.errors import SeamError
from fedring.train.jobs.job import Job
from fedring.train.jobs.override_table import with_overrides
from fedring.train.jobs.start import BEST, FRESH, NEWEST, is_path, version_of
from fedring.train.names.name_checks import check_data
from fedring.train.names.offered import Offered
from fedring.train.names.seam import optimizer_factory
from fedring.train.tensors.skeleton import build_skeleton

_ON_SERVER_TOO = ("data", "loss", "evaluator")
"""The keys of the parts that the server needs, besides the model, if it evaluates."""

_TO_TRAIN = ("loss", "optimizer", "trainer")
"""The keys of the parts that the server needs, besides the model, if its rule trains."""

_VALUE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}
"""The least bytes of a value in an encoding; other encodings leave values out."""


_READ = "fl-server had read it: restart fl-server, which still runs the old code"


class JobChecks:
    """Checks jobs before they are queued.

    Its methods may take long: not for the event loop.
    """

    def __init__(self, config: ServerConfig, maker: ModelMaker) -> None:
        self._config, self._maker, self._offered = config, maker, maker.offered

    def check(self, job: Job, kept: Sequence[ModelRow], *, runs_next: bool) -> str:
        """Return if nothing is known that would make the job fail.

        Args:
            job: the job.
            kept: the model versions that are kept.
            runs_next: whether no other job runs before it.

        Returns:
            a warning; empty if there is none.

        Raises:
            ConfigError: if something is; one sentence that names the key.
        """
        edited = self._offered.edited(_READ)
        try:
            self._check(job, kept, runs_next=runs_next)
        except ConfigError as error:
            if edited:
                raise ConfigError(f"{error} ({edited})") from error
            raise
        late = job.asynchronous.warning if job.asynchronous else ""
        return "; ".join(filter(None, (late, edited)))

    def _check(self, job: Job, kept: Sequence[ModelRow], *, runs_next: bool) -> None:
        for key, kind, name in _names(job):
            evaluated = job.evaluate_on_server and key in _ON_SERVER_TOO
            trained = bool(job.aggregation.data) and key in _TO_TRAIN
            self._check_name(key, kind, name, needed=evaluated or trained)
        try:
            strategy = make_strategy(job.aggregation, self._offered)
        except SeamError as error:
            raise ConfigError(f"aggregation.rule: {error}") from error
        try:
            transforms = transforms_of(job)
        except SeamError as error:
            raise ConfigError(f"transforms: {error}") from error
        try:
            self._maker.check_samples(job)
        except (SeamError, DataError) as error:
            raise ConfigError(f"aggregation.data: {error}") from error
        own = [
            ("", job),
            *((f"override.{place}: ", with_overrides(job, [place])) for place in range(len(job.override))),
        ]
        for where, each in own:
            try:
                try_optimizer(each, self._offered)
            except SeamError as error:
                raise ConfigError(f"{where}{key_of(error)}: {error}") from error
        if job.evaluate_on_server:
            checks = (
                *check_data_root(self._config.data_root),
                check_data("data", job.data, self._offered, root=self._config.data_root),
            )
            for found in checks:
                if found.level is Level.FAIL:
                    raise ConfigError(f"{found.name}: {found.found}")
        # To build the model takes long, so the checks that need no schema come before it.
        schema = self._check_model(job)
        self._check_sizes(job, schema, transforms)
        for where, each in own:
            try:
                transforms.check(each, schema, lambda: self._skeleton(job))
            except ValueError as error:
                raise ConfigError(f"{where}{error}") from error
        _check_best_by(job, strategy)
        if job.asynchronous and job.asynchronous.max_staleness >= (keep := self._config.keep_models):
            raise ConfigError(
                f"asynchronous.max_staleness: clients may begin with {job.asynchronous.max_staleness} versions before "
                f"the newest, and this server keeps the newest keep_models={keep}: raise that, or lower max_staleness"
            )
        alike = [row for row in kept if row.schema_hash == schema.hash.hex()]
        self._check_start(job, kept, alike, runs_next=runs_next)
        if job.start == BEST and runs_next and best_of(alike, job.best_by) is None:
            what = f"has {job.best_by.split()[1]}, which best_by names" if job.best_by else "was evaluated"
            raise ConfigError(f"start: no version of this model that is kept {what}: use newest or fresh")

    def _check_name(self, key: str, kind: Kind, name: str, *, needed: bool) -> None:
        """Check a name, unless only clients need it and can know it."""
        try:
            self._offered.get(kind, name)
        except SeamError as error:
            if needed or error.reason != "not_offered" or self._offered.knows_module(name):
                raise ConfigError(f"{key}: {error}") from error

    def _check_model(self, job: Job) -> Schema:
        try:
            schema = self._maker.job_models.schema_of(job)
            if job.training.layers:
                self._check_layers(job)
        except SeamError as error:
            if error.reason == "bad_sharing":  # it names its key
                raise ConfigError(str(error)) from error
            raise ConfigError(f"model: {error}") from error
        return schema

    def _check_layers(self, job: Job) -> None:
        """Check that the layers that begin stages are parts of the model."""
        model = self._skeleton(job)
        known = [name for name, _ in model.named_modules() if name]
        for layer in job.training.layers:
            if layer not in known:
                near = get_close_matches(layer, known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(known[:20])}"
                raise ConfigError(f"pipeline.cut: {job.model} has no layer {layer}: {hint}")

    def _skeleton(self, job: Job) -> nn.Module:
        return build_skeleton(job.model, job.model_args, job.seed, self._offered)

    def _check_sizes(self, job: Job, schema: Schema, transforms: Transforms) -> None:
        clients, most = job.training.workers or job.min_clients, self._config.max_clients
        if clients > most:
            key = job.mode if job.training.workers else "min_clients"
            raise ConfigError(f"{key}: the job needs {clients} clients, but this server takes max_clients={most}")
        limit = self._config.max_update_bytes
        encoding = "fp32" if job.training.grouped else job.encoding
        least = schema.num_parameters * _VALUE_BYTES.get(encoding, 0) + 8 * schema.num_buffers
        if 0 < limit < (size := transforms.update_bytes(least)):
            raise ConfigError(
                f"encoding: an update as {encoding} has at least {size} bytes, but this server takes "
                f"max_update_bytes={limit}: raise that, or choose another encoding"
            )

    def _check_start(self, job: Job, kept: Sequence[ModelRow], alike: Sequence[ModelRow], *, runs_next: bool) -> None:
        try:
            if job.start == FRESH or is_path(job.start):
                self._maker.check_file(job, job.start if is_path(job.start) else "")
            elif version := version_of(job.start):
                row = next((row for row in kept if row.version == version), None)
                if row is None:
                    versions = ", ".join(str(row.version) for row in kept[:10]) or "none"
                    raise ConfigError(f"start: version {version} is not kept, but these are: {versions}")
                self._maker.job_models.check_fits(row, job)
                self._maker.job_models.frozen_digest(job, row)
            elif job.start == NEWEST and runs_next and alike:
                self._maker.job_models.frozen_digest(job, alike[0])
        except SeamError as error:
            raise ConfigError(f"start: {error}") from error


def try_optimizer(job: Job, offered: Offered) -> None:
    """Make the clients' optimizer once, if it can be imported here.

    Raises:
        SeamError: It does not take its arguments, or has momentum beside that of dgc.
    """
    try:
        make = optimizer_factory(job.optimizer, job.optimizer_args, offered)
    except SeamError as error:
        if error.reason == "not_offered":  # it was checked already, or only clients have it
            return
        raise
    applied = job.training.applied_momentum(job.momentum)
    make_optimizer(
        make, [torch.nn.Parameter(torch.zeros(1))], job.settings_of(1).lr, job.momentum, dgc_momentum=applied
    )


def key_of(error: SeamError) -> str:
    """Return the key of a job that explains an error of `try_optimizer`."""
    return "optimizer" if error.reason == "bad_job" else "optimizer_args"


def _check_best_by(job: Job, strategy: Strategy) -> None:
    """Check that the job makes the evaluations named by its `best_by`."""
    on_server = job.evaluate_on_server or strategy.evaluate is not None
    evaluations = {"eval": ("evaluate", job.evaluate), "server": ("evaluate_on_server", on_server)}
    name = job.best_by.rpartition(" ")[2]
    key, evaluated = evaluations.get(name.partition("/")[0], ("", True))
    if not evaluated:
        raise ConfigError(f"best_by: {name} is never known, because the job has {key} = false: set {key} = true")


def _names(job: Job) -> Iterator[tuple[str, Kind, str]]:
    """Return the parts of a job that clients use, except its model.

    Each part is given by its key, kind and name.
    """
    yield "data", "data", job.data
    yield "loss", "loss", job.loss
    yield "optimizer", "optimizer", job.optimizer
    if job.trainer:
        yield "trainer", "trainer", job.trainer
    if job.evaluator:
        yield "evaluator", "evaluator", job.evaluator
    yield from job.training.own_code(job.momentum)
