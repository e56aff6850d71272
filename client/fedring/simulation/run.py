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
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError

from fedring.client.transfer.control import OwnControl
from fedring.codec import CodecError
from fedring.codec.schema import Schema, Vectors
from fedring.control.failure import Failure
from fedring.daemon.config import ConfigError
from fedring.daemon.exits import Exit
from fedring.privacy.noise import SECRET_BYTES
from fedring.server.config import ServerConfig
from fedring.server.model.guards import weight_of
from fedring.server.model.making import ModelMaker
from fedring.server.model.modelfile import ModelReader
from fedring.server.model.optimizer import OptimizerError
from fedring.server.model.private_mean import private_round
from fedring.server.model.rule import RuleError
from fedring.server.model.strategy import HISTORY, PastClient, PastRound, StrategyError, with_settings
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
    check_engine,
    check_enough,
    check_numbers,
    job_of,
    make_folder,
    trusted_by,
)
from fedring.simulation.engine import Engine, InProcess, Processes
from fedring.simulation.vectors import ClientVectors
from fedring.simulation.worker import Order, Outcome, Own, Setup, Turn, client_id
from fedring.train.device import threads_for
from fedring.train.errors import SeamError
from fedring.train.evaluation import Counts
from fedring.train.files import save_vectors
from fedring.train.job import Job
from fedring.train.metrics import combine, with_origin
from fedring.train.start import is_path
from fedring.v1 import federation_pb2 as pb

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
    threads: int | None = None,
    data_root: str | Path | None = None,
    device: str = "auto",
    engine: str = "local",
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
        threads: With which torch computes in each worker; None = the worker's share of the cores.
        data_root: Folder of the data sets.
        device: Where to train: auto, cpu, cuda or cuda:N.
        engine: Where the workers run: local (processes of this machine), or ray (actors on a Ray cluster).
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
    root = Path(data_root).absolute() if data_root else None
    count = len(os.sched_getaffinity(0)) if workers is None else workers
    check_numbers(spec, clients, count, threads)
    check_engine(engine)
    check_data_root(root)
    if out:
        make_folder(Path(out))
    setup = Setup(spec, clients, root, trusted_by(spec), device, threads or threads_for(count))
    try:
        report = _simulate(setup, count, engine, out, show)
        if out:
            (Path(out) / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise Failure(f"the simulation cannot go on: {error}") from error
    return report


def _simulate(setup: Setup, count: int, engine: str, out: str | Path | None, show: Show) -> dict[str, Any]:
    spec, clients = setup.job, setup.clients
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=".simulation-", dir=out)))
        server = _Server(spec, setup, folder, stack)
        server.check()
        running = stack.enter_context(_engine(engine, setup, count))
        check_enough(spec, clients, sum(size > 0 for size in running.sizes))
        began = time.perf_counter()
        run = _Run(setup, server, running, folder, show)
        run.run(stack)
        report = run.report(Path(out) if out else folder)
        report |= {"workers": count, "seconds": time.perf_counter() - began}
        report["updates_per_second"] = report["updates"] / report["seconds"]
    return report


def _engine(name: str, setup: Setup, workers: int) -> Engine:
    if name == "ray":
        from fedring.simulation.ray_engine import Actors

        return Actors(setup, workers)
    return InProcess(setup) if workers == 1 else Processes(setup, workers)


class _Server:
    """What the server of a simulation keeps: the newest model, and the means to make the next one."""

    def __init__(self, job: Job, setup: Setup, folder: Path, stack: ExitStack) -> None:
        config = ServerConfig.model_construct(  # which does not read the environment
            trusted=list(setup.trusted),
            data_root=setup.data_root,
            init_path=Path(job.start) if is_path(job.start) else None,
            max_clients=setup.clients,
        )
        self._blobs = FileBlobs(folder, durable=False)
        stack.callback(self._blobs.close)
        executor = stack.enter_context(ThreadPoolExecutor(config.threads))
        self._job, self._last_median, self._clip = job, 0.0, 0.0
        self._maker = ModelMaker(self._blobs, executor, config, _RUN_ID, ModelVersions(self._blobs))
        self._checks = JobChecks(config, self._maker)

    def check(self) -> None:
        """Make the checks of a server that is asked to queue the job.

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
        """Return what a model consists of, and its values."""
        with self._blobs.reader(row.blob) as blob:
            reader = ModelReader(blob)
            return reader.schema, reader.vectors()

    def read_control(self, row: ModelRow) -> NDArray[np.float32]:
        """Return the control variate that belongs to a model, [num_parameters]."""
        with self._blobs.reader(row.control_blob) as blob:
            return ModelReader(blob).vectors().parameters

    def settings(self, history: Iterable[PastRound]) -> dict[str, float]:
        """Return what the job's own strategy chooses for the next round, from the rounds before it, oldest first.

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

    def next(self, base: ModelRow, work: "_Work") -> ModelRow:
        """Make the model that a round publishes, and forget the one that it started from.

        Args:
            base: The model that the round started from.
            work: What has come of the round.

        Raises:
            StorageError, CodecError, OptimizerError, RuleError, SeamError, RuntimeError: It cannot be made; the last is
                torch's.
        """
        job, updates, number, command = work.job, work.updates, work.number, work.command
        guarded, noisy = self._maker.guard(job, updates, self._last_median, job_round=number), None
        if job.dp is not None:
            clip, secret = self._clip or job.dp.clip, os.urandom(SECRET_BYTES)
            private = private_round(job.dp, updates, work.selected, clip, secret, _RUN_ID)
            guarded, noisy, self._clip = private.guarded, private.mean, private.next_clip
        model = self._maker.next(
            base,
            updates,
            job,
            number,
            base.version + 1,
            seed=str(command.seed),
            guarded=guarded,
            noisy=noisy,
            job_round=number,
            control_line=command.control.line,
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
    job: Job  # with the settings of this round
    settings: dict[str, float] = field(default_factory=dict)  # that its strategy or a schedule has chosen
    command: pb.TrainCmd = field(default_factory=pb.TrainCmd)
    selected: int = 0
    reason: str = ""  # why it makes no model: a stable word
    why: str = ""  # the same, as a clause
    began: float = field(default_factory=time.perf_counter)
    updates: list[UpdateRow] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

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
            seconds=row["seconds"],
            settings=MappingProxyType(self.settings),
            clients=MappingProxyType(clients),
            metrics=MappingProxyType(row["metrics"]),
        )


class _Run:
    """The rounds of one simulation."""

    def __init__(self, setup: Setup, server: _Server, engine: Engine, folder: Path, show: Show) -> None:
        self._setup, self._job, self._server, self._engine = setup, setup.job, server, engine
        self._folder, self._show = folder, show
        self._candidates = sorted(client_id(client) for client, size in enumerate(engine.sizes) if size)
        self._rules = rules_of(setup.job, grace=0.0)
        self._drawn: set[str] = set()
        self._rows: list[Row] = []
        self._history = deque[PastRound](maxlen=HISTORY)
        (folder / "personal").mkdir()
        self._left_by: dict[int, tuple[str, str]] = {}  # the line and the update of each client's control variate

    def run(self, stack: ExitStack) -> None:
        """Run all rounds.

        Raises:
            Failure: Too many rounds were abandoned in a row, or the simulation cannot go on.
        """
        try:
            self._model = self._server.first()
            self._schema, self._vectors = self._server.read(self._model)
            size = self._schema.num_parameters
            self._residuals = stack.enter_context(ClientVectors(self._folder / "residuals", size))
            self._controls = stack.enter_context(ClientVectors(self._folder / "controls", size))
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
            work = self._work(number)
            row = work.row()
            copies = 2 if work.command.control.digest else 1  # of the parameters: c is as large as they are
            row["download_bytes"] = 4 * copies * self._schema.num_parameters + 8 * self._schema.num_buffers
            abandoned = abandoned + 1 if work.reason else 0
            if not work.reason:
                self._evaluate(row)
                models.append(replace(self._model, metrics=row["metrics"]))
            self._rows.append(row)
            self._history.append(work.past(row))
            self._show(number / self._job.rounds, row)
            if abandoned >= min(self._job.max_abandoned, self._job.rounds):
                because = f": {work.failures[0]}" if work.failures else ""
                raise Failure(f"round {number} is abandoned, because {work.why}{because}".rstrip("."))
            if not work.reason and self._server.no_better(models):
                return

    def _work(self, number: int) -> _Work:
        """Run a round, and make its model, if that is possible."""
        work = _Work(number, self._job)
        try:
            chosen = self._server.settings(self._history)
        except (StrategyError, SeamError) as error:
            work.reason, work.why = error.reason, str(error)
            return work
        work.job = with_settings(self._job, chosen)
        self._train(work)
        work.settings |= chosen
        if len(work.updates) < self._rules.min_to_aggregate:
            work.reason = "too_few_clients"
            work.why = f"{len(work.updates)} of {work.selected} clients delivered an update"
        else:
            self._publish(work)
        return work

    def _train(self, work: _Work) -> None:
        number, rules = work.number, rules_of(work.job, grace=0.0)
        row = RoundRow(number, 1, number, Phase.TRAINING, 0.0)
        work.command = command = round_command(work.job, row, self._model, run_id=_RUN_ID, epoch=_EPOCH, most_bytes=0)
        names = machine.sample(self._candidates, Round(number, rules, Phase.WAITING, 0.0))
        work.selected = len(names)
        work.settings = {key: getattr(command, key) for key in work.job.scheduled}
        self._drawn.update(names)
        control = self._server.read_control(self._model) if command.control.digest else None
        order = Order(command.SerializeToString(), self._vectors, control)
        for outcome in self._engine.train(order, self._turns(names, command.control.line)):
            self._take(outcome, work)
            share = (len(work.updates) + len(work.failures)) / work.selected
            self._show((number - 1 + share) / self._job.rounds, self._rows[-1] if self._rows else None)

    def _turns(self, names: list[str], line: str) -> Iterator[Turn]:
        """Yield the turns of the clients; what they keep is read when it is needed."""
        for client in (int(name.rpartition("-")[2]) for name in names):
            left_in, left_by = self._left_by.get(client, ("", ""))
            values = self._controls.get(client) if line and left_in == line else None
            own = None if values is None else OwnControl(line, left_by, values)
            personal = self._personal_file(client)
            yield Turn(client, self._residuals.get(client), own, personal.read_bytes() if personal.exists() else None)

    def _personal_file(self, client: int) -> Path:
        return self._folder / "personal" / f"{client}.safetensors"

    def _take(self, outcome: Outcome, work: _Work) -> None:
        if outcome.update is None:
            work.failures.append(outcome.failure)
            return
        work.updates.append(outcome.update)
        self._residuals.put(outcome.client, outcome.residual)
        if outcome.personal:
            self._personal_file(outcome.client).write_bytes(outcome.personal)
        if outcome.own is not None:
            self._controls.put(outcome.client, outcome.own.values)
            self._left_by[outcome.client] = outcome.own.line, outcome.own.left_by

    def _publish(self, work: _Work) -> None:
        """Make the next model, or note why that is impossible."""
        try:
            self._model = self._server.next(self._model, work)
        except (CodecError, OptimizerError, RuleError, SeamError, RuntimeError) as error:  # the last is torch's
            work.reason = getattr(error, "reason", "bad_optimizer")
            work.why = f"no model can be made of the updates: {error}"
        else:
            _, self._vectors = self._server.read(self._model)

    def _evaluate(self, row: Row) -> None:
        began = time.perf_counter()
        try:
            row["metrics"] |= with_origin("server", self._server.metrics(self._model))
        except (StrategyError, SeamError) as error:
            row["warnings"] = [str(error)]
        origins = {"eval": self._job.evaluate, "server": self._job.evaluate_on_server}
        if not any(origins.values()):
            return
        counts: Counts = self._engine.evaluate(self._vectors)
        row["evaluate_seconds"] = time.perf_counter() - began
        row["accuracy"], row["loss"] = counts.accuracy, counts.loss
        for origin in (origin for origin, wanted in origins.items() if wanted):
            row["metrics"] |= with_origin(origin, counts.metrics, accuracy=counts.accuracy, loss=counts.loss)
        if self._job.evaluate and self._job.personal:
            files = {client: self._personal_file(client) for client in range(self._setup.clients)}
            owns = (Own(client, path.read_bytes()) for client, path in files.items() if path.exists())
            found = combine((own.total, figures) for own, figures in self._engine.evaluate_own(owns))
            row["metrics"] |= with_origin("eval", found)
