"""A simulation: the rounds of one job, with clients that take turns in a few processes.

Each round does what fl-server does, with its functions: `machine.sample` draws the clients, `round_command` makes the
command, and `ModelMaker` makes the next model. So for the same job, the same number of clients and torch's same number
of threads, the models are those of real daemons, byte for byte.
"""

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedring.codec import CodecError
from fedring.codec.schema import Schema, Vectors
from fedring.control.failure import Failure
from fedring.daemon.config import ConfigError
from fedring.daemon.exits import Exit
from fedring.server.config import ServerConfig
from fedring.server.model.guards import guard
from fedring.server.model.making import ModelMaker
from fedring.server.model.modelfile import ModelReader
from fedring.server.model.optimizer import OptimizerError, ServerOptimizer
from fedring.server.model.rule import RuleError
from fedring.server.model.versions import ModelVersions, files_of
from fedring.server.operator.job_checks import JobChecks
from fedring.server.round import machine
from fedring.server.round.events import Phase, Round
from fedring.server.round.plan import round_command, rules_of
from fedring.server.state.blobs import FileBlobs
from fedring.server.state.failures import StorageError
from fedring.server.state.ratings import best_of
from fedring.server.state.rows import ModelRow, RoundRow, UpdateRow
from fedring.simulation.checks import (
    check_data_root,
    check_enough,
    check_numbers,
    job_of,
    make_folder,
    trusted_by,
)
from fedring.simulation.engine import Engine, InProcess, Processes
from fedring.simulation.residuals import Residuals
from fedring.simulation.worker import Order, Outcome, Setup, Turn, client_id
from fedring.train.device import threads_for
from fedring.train.errors import SeamError
from fedring.train.evaluation import Counts
from fedring.train.files import save_vectors
from fedring.train.job import Job
from fedring.train.metrics import combine, with_origin
from fedring.train.start import is_path

Row = dict[str, Any]
Show = Callable[[float, Row | None], None]
"""Takes the share of the work that is done, from 0 to 1, and the row of the last round that has ended, if any has."""

_RUN_ID = "simulation"
_EPOCH = 1
_FAILURES = 10
"""The most failures of clients that the row of a round keeps."""


def simulate(
    job: Job | Mapping[str, Any] | str | Path,
    *,
    clients: int,
    per_round: int | None = None,
    seed: int | None = None,
    workers: int | None = None,
    data_root: str | Path | None = None,
    device: str = "auto",
    out: str | Path | None = None,
    show: Show = lambda share, row: None,
) -> dict[str, Any]:
    """Run a job with simulated clients on this machine, and return its report.

    The modules that the job names are imported, in this process and in the workers.

    Args:
        job: The job, its keys, or the .toml or .json file that holds them. Keys about waiting have no effect.
        clients: The number of clients, among whom the training samples are divided as the job says.
        per_round: The clients that are drawn for a round; None = as the job says.
        seed: In the place of the job's seed; None = as the job says.
        workers: Processes that train; None = one for each core. One worker trains in this process.
        data_root: Folder of the data sets.
        device: Where to train: auto, cpu, cuda or cuda:N.
        out: Folder for report.json and model.safetensors, which is made. None = the report is only returned.
        show: Is called after each client.

    Returns:
        The report: `rounds`, a row for each round with the figures that `flctl demo` has, and `failures`, at most 10
        sentences; `accuracy` and `loss` of the last model; its `parameters` and `model_sha256`; and figures of the
        simulation (docs/simulation.md).

    Raises:
        ConfigError, Failure: With one sentence for people; `exit_code` of a Failure is 78 if the input is wrong.
    """
    spec = job_of(job, per_round=per_round, seed=seed)
    root = Path(data_root) if data_root else None
    count = len(os.sched_getaffinity(0)) if workers is None else workers
    check_numbers(spec, clients, count)
    check_data_root(root)
    if out:
        make_folder(Path(out))
    setup = Setup(spec, clients, root, trusted_by(spec), device, threads_for(count))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=".simulation-", dir=out)))
        server = _Server(spec, setup, folder, stack)
        server.check()
        engine: Engine = InProcess(setup) if count == 1 else Processes(setup, count)
        running = stack.enter_context(engine)
        check_enough(spec, clients, sum(size > 0 for size in running.sizes))
        began = time.perf_counter()
        run = _Run(setup, server, running, folder, show)
        run.run(stack)
        report = run.report(Path(out) if out else folder)
        report |= {"workers": count, "seconds": time.perf_counter() - began}
        report["updates_per_second"] = report["updates"] / report["seconds"]
    if out:
        (Path(out) / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return report


class _Server:
    """What the server of a simulation keeps: the newest model, and the means to make the next one."""

    def __init__(self, job: Job, setup: Setup, folder: Path, stack: ExitStack) -> None:
        config = ServerConfig.model_construct(  # which does not read the environment
            trusted=list(setup.trusted),
            data_root=setup.data_root,
            init_path=Path(job.start) if is_path(job.start) else None,
            max_clients=setup.clients,
        )
        self._blobs = FileBlobs(folder)
        stack.callback(self._blobs.close)
        executor = stack.enter_context(ThreadPoolExecutor(config.threads))
        self._job, self._last_median = job, 0.0
        self._maker = ModelMaker(self._blobs, executor, config, _RUN_ID, ModelVersions(self._blobs))
        self._checks = JobChecks(config, self._maker)

    def check(self) -> None:
        """Make the checks of a server that is asked to queue the job.

        Raises:
            Failure: The job would fail.
        """
        try:
            self._checks.check(self._job, [], runs_next=True)
            if chosen := self._job.server_optimizer:
                ServerOptimizer(chosen.name, chosen.args)
        except ConfigError as error:
            raise Failure(str(error).rstrip("."), Exit.CONFIG) from error
        except OptimizerError as error:
            raise Failure(f"server_optimizer: {error}", Exit.CONFIG) from error

    def first(self) -> ModelRow:
        """Make the first model."""
        path = self._job.start if is_path(self._job.start) else ""
        return self._maker.first(self._job, 1, path)

    def read(self, row: ModelRow) -> tuple[Schema, Vectors]:
        """Return what a model consists of, and its values."""
        with self._blobs.reader(row.blob) as blob:
            reader = ModelReader(blob)
            return reader.schema, reader.vectors()

    def next(self, base: ModelRow, updates: list[UpdateRow], number: int, seed: int) -> ModelRow:
        """Make the model that a round publishes, and forget the one that it started from.

        Args:
            base: The model that the round started from.
            updates: Its updates.
            number: Of the round.
            seed: Of the round.

        Raises:
            StorageError, CodecError, OptimizerError, RuleError, SeamError, RuntimeError: It cannot be made; the last is
                torch's.
        """
        guarded = guard(self._job, updates, self._last_median, job_round=number)
        version = base.version + 1
        model = self._maker.next(
            base, updates, self._job, number, version, seed=seed, job_round=number, guarded=guarded
        )
        self._last_median = guarded.median_norm
        for name in {*files_of(base)} - {*files_of(model), ""}:
            self._blobs.delete(name)
        return model

    def no_better(self, models: list[ModelRow]) -> bool:
        """Return whether the job ends early: since its best model it has published `patience` others."""
        best = best_of(models, self._job.best_by) if self._job.patience else None
        return best is not None and models[-1].version - best.version >= self._job.patience


@dataclass(slots=True)
class _Work:
    """What has come of a round so far."""

    number: int
    seed: int
    selected: int
    began: float = field(default_factory=time.perf_counter)
    updates: list[UpdateRow] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def row(self) -> Row:
        """Return the figures of the round, without those of its evaluation."""
        metrics = combine((update.num_samples, update.metrics) for update in self.updates)
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
        }


class _Run:
    """The rounds of one simulation."""

    def __init__(self, setup: Setup, server: _Server, engine: Engine, folder: Path, show: Show) -> None:
        self._setup, self._job, self._server, self._engine = setup, setup.job, server, engine
        self._folder, self._show = folder, show
        self._candidates = sorted(client_id(client) for client, size in enumerate(engine.sizes) if size)
        self._rules = rules_of(setup.job, grace=0.0)
        self._drawn: set[str] = set()
        self._rows: list[Row] = []

    def run(self, stack: ExitStack) -> None:
        """Run all rounds.

        Raises:
            Failure: Too many rounds were abandoned in a row, or the simulation cannot go on.
        """
        try:
            self._model = self._server.first()
            self._schema, self._vectors = self._server.read(self._model)
            size = self._schema.num_parameters
            self._residuals = stack.enter_context(Residuals(self._folder / "residuals", size))
            self._run_rounds()
        except (SeamError, StorageError, CodecError) as error:
            raise Failure(str(error)) from error

    def report(self, folder: Path) -> dict[str, Any]:
        """Write the newest model to `folder`/model.safetensors, and return the report."""
        path = folder / "model.safetensors"
        save_vectors(self._schema, self._vectors, path)
        last = next((row for row in reversed(self._rows) if "reason" not in row), self._rows[-1])
        return {
            "rounds": self._rows,
            "accuracy": last["accuracy"],
            "loss": last["loss"],
            "parameters": self._schema.num_parameters,
            "model_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "clients": self._setup.clients,
            "clients_without_samples": self._setup.clients - len(self._candidates),
            "clients_drawn": len(self._drawn),
            "updates": sum(row["clients"] for row in self._rows),
        }

    def _run_rounds(self) -> None:
        abandoned, models = 0, list[ModelRow]()
        for number in range(1, self._job.rounds + 1):
            work = self._train(number)
            if len(work.updates) < self._rules.min_to_aggregate:
                reason = f"{len(work.updates)} of {work.selected} clients delivered an update"
            else:
                reason = self._publish(work)
            row = work.row() | ({"reason": reason} if reason else {})
            row["download_bytes"] = 4 * self._schema.num_parameters + 8 * self._schema.num_buffers
            abandoned = abandoned + 1 if reason else 0
            if not reason:
                self._evaluate(row)
                models.append(replace(self._model, metrics=row["metrics"]))
            self._rows.append(row)
            self._show(number / self._job.rounds, row)
            if abandoned >= min(self._job.max_abandoned, self._job.rounds):
                because = f": {work.failures[0]}" if work.failures else ""
                raise Failure(f"round {number} is abandoned, because {reason}{because}".rstrip("."))
            if not reason and self._server.no_better(models):
                return

    def _train(self, number: int) -> _Work:
        row = RoundRow(number, 1, number, Phase.TRAINING, 0.0)
        command = round_command(self._job, row, self._model, run_id=_RUN_ID, epoch=_EPOCH, most_bytes=0)
        names = machine.sample(self._candidates, Round(number, self._rules, Phase.WAITING, 0.0))
        work = _Work(number, command.seed, len(names))
        self._drawn.update(names)
        order = Order(command.SerializeToString(), self._vectors)
        for outcome in self._engine.train(order, self._turns(names)):
            self._take(outcome, work)
            share = (len(work.updates) + len(work.failures)) / work.selected
            self._show((number - 1 + share) / self._job.rounds, self._rows[-1] if self._rows else None)
        return work

    def _turns(self, names: list[str]) -> Iterator[Turn]:
        """Yield the turns of the clients; a residual is read when it is needed."""
        for client in (int(name.rpartition("-")[2]) for name in names):
            yield Turn(client, self._residuals.get(client))

    def _take(self, outcome: Outcome, work: _Work) -> None:
        if outcome.update is None:
            work.failures.append(outcome.failure)
            return
        work.updates.append(outcome.update)
        self._residuals.put(outcome.client, outcome.residual)

    def _publish(self, work: _Work) -> str:
        """Make the next model. Returns why that is impossible, or an empty text."""
        try:
            self._model = self._server.next(self._model, work.updates, work.number, work.seed)
        except (CodecError, OptimizerError, RuleError, SeamError, RuntimeError) as error:  # the last is torch's
            return f"no model can be made of the updates: {error}"
        _, self._vectors = self._server.read(self._model)
        return ""

    def _evaluate(self, row: Row) -> None:
        origins = {"eval": self._job.evaluate, "server": self._job.evaluate_on_server}
        if not any(origins.values()):
            return
        began = time.perf_counter()
        counts: Counts = self._engine.evaluate(self._vectors)
        row["evaluate_seconds"] = time.perf_counter() - began
        row["accuracy"], row["loss"] = counts.accuracy, counts.loss
        for origin in (origin for origin, wanted in origins.items() if wanted):
            row["metrics"] |= with_origin(origin, counts.metrics, accuracy=counts.accuracy, loss=counts.loss)
