"""The server of a simulation.

It makes models with the functions of fl-server, and keeps the newest one.
"""

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedring.codec.schema import Schema, Vectors
from fedring.control.failure import Failure
from fedring.daemon.config import ConfigError
from fedring.daemon.exits import Exit
from fedring.data import takes_part
from fedring.privacy.keystream import SECRET_BYTES
from fedring.server.aggregation.contributions import HeldValues
from fedring.server.aggregation.modelfile import ModelReader
from fedring.server.aggregation.strategy import PastClient, PastRound
from fedring.server.aggregation.versions import ModelVersions
from fedring.server.config import ServerConfig
from fedring.server.model.guards import weight_of
from fedring.server.model.making import ModelMaker
from fedring.server.model.masked_sum import GroupMasks
from fedring.server.model.transforms.transform import ClosedRound
from fedring.server.operator.job_checks import JobChecks
from fedring.server.state.blobs import FileBlobs
from fedring.server.state.ratings import best_of
from fedring.server.state.rows import ModelRow, UpdateRow
from fedring.simulation.clock import RoundTimes
from fedring.simulation.groups import Group
from fedring.simulation.samples import Setup
from fedring.simulation.vectors import Vector
from fedring.train.bounds import MAX_COUNT
from fedring.train.errors import SeamError
from fedring.train.evaluation import Counts
from fedring.train.jobs.job import Job
from fedring.train.jobs.start import is_path
from fedring.train.metrics import combine, with_origin
from fedring.v1 import federation_pb2 as pb

Row = dict[str, Any]
"""The figures of a round, for reports."""

RUN_ID = "simulation"
_FAILURES = 10
"""The most failures of clients that the row of a round keeps."""


class SimulatedServer:
    """The newest model, and the means to make the next one."""

    def __init__(self, job: Job, setup: Setup, folder: Path, stack: ExitStack) -> None:
        config = ServerConfig.model_construct(  # which does not read the environment
            trusted=list(setup.trusted),
            data_root=setup.data_root,
            init_path=Path(job.start) if is_path(job.start) else None,
            max_clients=setup.clients,
            keep_models=MAX_COUNT,  # clients train at once, so that no old model is needed
        )
        self._blobs = FileBlobs(folder, durable=False)
        stack.callback(self._blobs.close)
        executor = stack.enter_context(ThreadPoolExecutor(config.threads))
        self._job, self._stats = job, dict[str, Any]()  # the figures of the last round that has published a model
        self._uncounted: list[UpdateRow] = []  # of rounds that were abandoned since
        try:
            offered = setup.offered()
            versions = ModelVersions(self._blobs)
            self._maker = ModelMaker(self._blobs, executor, config, RUN_ID, versions, offered=offered)
        except SeamError as error:  # something that the job names cannot be imported
            raise Failure(str(error).rstrip("."), Exit.CONFIG) from error
        self._checks = JobChecks(config, self._maker)

    def check(self) -> None:
        """Check the job as a server does before it queues one.

        Raises:
            Failure: The job would fail.
        """
        try:
            self._checks.check(self._job, [], runs_next=True)
        except ConfigError as error:
            raise Failure(str(error).rstrip("."), Exit.CONFIG) from error

    def first(self) -> ModelRow:
        """Make the first model."""
        path = self._job.start if is_path(self._job.start) else ""
        return self._maker.first(self._job, 1, path)

    def read(self, row: ModelRow) -> tuple[Schema, Vectors]:
        """Return the schema and the values of a model."""
        with self._blobs.reader(row.blob) as blob:
            reader = ModelReader(blob)
            return reader.schema, reader.vectors()

    def read_control(self, row: ModelRow) -> NDArray[np.float32]:
        """Return the control variate that belongs to a model, [num_parameters]."""
        with self._blobs.reader(row.control_blob) as blob:
            return ModelReader(blob).vectors().parameters

    def settings(self, history: Iterable[PastRound]) -> dict[str, float]:
        """Return the next round's settings from the job's own strategy.

        Args:
            history: The rounds before it, oldest first.

        Raises:
            StrategyError, SeamError: It fails.
        """
        return self._maker.ask_settings(self._job, history) if self._job.aggregation.own else {}

    def metrics(self, row: ModelRow) -> dict[str, float]:
        """Return the figures that the job's own strategy finds of a model.

        Raises:
            StrategyError, SeamError: It fails.
        """
        return self._maker.ask_metrics(row, self._job) if self._job.aggregation.own else {}

    @property
    def loads_its_own(self) -> bool:
        """Whether the server evaluates on other samples than the clients.

        A data callable that takes a part returns those of one client.
        """
        return takes_part(self._maker.offered.get("data", self._job.data))

    def evaluate(self, row: ModelRow) -> Counts:
        """Evaluate a model on the server's own samples, part 0 of 1.

        Raises:
            EvaluationFailed: It fails.
        """
        return self._maker.test_set.evaluate(row, self._job)

    def command(self, job: Job, command: pb.TrainCmd, base: ModelRow) -> None:
        """Add the fields of the job's transforms to a round's command."""
        self._maker.command(job, command, base)

    def next(self, base: ModelRow, work: "Work") -> ModelRow:
        """Make the model of a round, and forget the one before.

        Args:
            base: The model that the round started from.
            work: The results of the round.

        Raises:
            StorageError, CodecError, OptimizerError, RuleError, SeamError, RuntimeError: It cannot be made; the last is
                torch's.
        """
        past = SimulatedPast(self._stats, self._uncounted)
        updates = work.counted
        closed = ClosedRound(
            work.job,
            work.command,
            updates,
            work.expected,
            groups=work.sums,
            past=past,
            told=work.told,
            in_memory=frozenset(row.client_id for row in updates),
            deltas={client: HeldValues(delta) for client, delta in work.deltas.items()},
        )
        prepared = self._maker.prepare(closed)
        model = self._maker.next(base, prepared, base.version + 1)
        self._stats, self._uncounted = prepared.stats(), []
        # Both models may share files, so delete only those that the new one does not use.
        for name in {*base.files} - {*model.files}:
            self._blobs.delete(name)
        return model

    def abandon(self, work: "Work") -> None:
        """Keep the updates of an abandoned round, for transforms that ask."""
        self._uncounted += work.updates if self._job.transforms else ()

    def no_better(self, models: list[ModelRow]) -> bool:
        """Return whether the job ends early, without a better model.

        Since its best model it has published `patience` others.
        """
        job = self._job
        best = best_of(models, job.best_by, min_delta=job.min_delta) if job.patience else None
        return best is not None and models[-1].version - best.version >= job.patience


@dataclass(frozen=True, slots=True)
class SimulatedPast:
    """The rounds before a round of a simulation."""

    stats: Mapping[str, Any]
    updates: Sequence[UpdateRow] = ()  # of rounds that were abandoned since the last model

    def last_stats(self) -> Mapping[str, Any]:
        """See `fedring.server.model.transforms.transform.Past`."""
        return self.stats

    def last_clip(self) -> float:
        """See `fedring.server.model.transforms.transform.Past`."""
        return float(self.stats.get("dp", {}).get("next_clip", 0.0))

    def uncounted(self) -> Sequence[UpdateRow]:
        """See `fedring.server.model.transforms.transform.Past`."""
        return self.updates

    def noise_secret(self) -> bytes:
        """Return a new secret, since a simulation is not resumed."""
        return os.urandom(SECRET_BYTES)


@dataclass(slots=True)
class Work:
    """The results of a round so far."""

    number: int
    job: Job  # with the settings of this round
    settings: dict[str, float] = field(default_factory=dict)  # that its strategy or a schedule has chosen
    command: pb.TrainCmd = field(default_factory=pb.TrainCmd)
    selected: int = 0
    reason: str = ""  # why it makes no model: a stable word
    why: str = ""  # the same, as a clause
    began: float = field(default_factory=time.perf_counter)
    updates: list[UpdateRow] = field(default_factory=list)
    deltas: dict[str, Vector] = field(default_factory=dict)  # of the parameters, by clients whose rows lack them
    failures: list[str] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)  # whose updates are only added up; empty = all are seen
    sums: list[GroupMasks] | None = None  # the groups that count; None = there are none
    told: dict[str, Job] = field(default_factory=dict)  # the jobs of clients for which overrides hold
    times: RoundTimes | None = None  # its course in virtual time; None = the simulation has no timing

    @property
    def counted(self) -> list[UpdateRow]:
        """The updates that the model is made of."""
        if self.sums is None:
            return self.updates
        left = {client for group in self.sums for client in group.clients}
        return [update for update in self.updates if update.client_id in left]

    @property
    def expected(self) -> int:
        """The number of clients that a private mean is divided by."""
        return self.job.asynchronous.buffer if self.job.asynchronous else self.selected

    def row(self) -> Row:
        """Return the figures of the round, without those of its evaluation."""
        metrics = combine((weight_of(self.job, update.num_samples), update.metrics) for update in self.updates)
        sent = sum(update.total_bytes for update in self.updates)
        return {
            "round": self.number,
            "accuracy": None,
            "loss": None,
            "metrics": with_origin("train", metrics),
            "clients": len(self.updates),
            "seconds": time.perf_counter() - self.began,
            "evaluate_seconds": 0.0,
            "train_seconds_max": max((update.train_seconds for update in self.updates), default=0.0),
            "upload_bytes": round(sent / max(1, len(self.updates))),
            "download_bytes": 0,
            "selected": self.selected,
            "failures": self.failures[:_FAILURES],
            **({"virtual": self.times.figures} if self.times else {}),
            **({"settings": self.settings} if self.settings else {}),
            **({"reason": self.why} if self.reason else {}),
        }

    def past(self, row: Row) -> PastRound:
        """Return the round as a strategy sees it when it is over."""
        updates = sorted(self.updates, key=lambda update: update.client_id)
        clients = {each.client_id: PastClient(each.num_samples, each.train_seconds, each.metrics) for each in updates}
        return PastRound(
            number=self.number,
            published=not self.reason,
            reason=self.reason,
            seconds=row["virtual"]["seconds"] if "virtual" in row else row["seconds"],
            settings=MappingProxyType(self.settings),
            clients=MappingProxyType(clients),
            metrics=MappingProxyType(row["metrics"]),
        )
