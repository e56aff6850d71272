"""A simulation: the rounds of one job.

The clients take turns in a few processes.

Each round does what fl-server does, with its functions: `machine.sample` draws the clients, `round_command` makes the
command, and `ModelMaker` makes the next model. So for the same job, the same number of clients with the same secrets
and torch's same number of threads, the models are those of real daemons, byte for byte.

With a timing, the server's round machine itself says who is drawn and whose update counts (`clock`).
"""

import gc
import hashlib
import json
import logging
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from safetensors import SafetensorError

from fedring.client.policy.privacy import SitePolicy
from fedring.client.transfer.own_values import PERSONAL
from fedring.codec import CodecError
from fedring.control.failure import Failure
from fedring.control.notebook import live_view
from fedring.daemon.exits import Exit
from fedring.daemon.wording import counted
from fedring.privacy.account import epsilon
from fedring.server.aggregation.rule import OptimizerError, RuleError
from fedring.server.aggregation.strategy import HISTORY, PastRound, StrategyError, with_settings
from fedring.server.config import ServerConfig
from fedring.server.model.testset import EvaluationFailed as ServerEvaluationFailed
from fedring.server.model.transforms.listing import transforms_of
from fedring.server.round import machine
from fedring.server.round.events import Phase, Round, RoundRules
from fedring.server.round.plan import round_command, rules_of
from fedring.server.state.failures import StorageError
from fedring.server.state.rows import ModelRow, RoundRow
from fedring.simulation.buffers import VirtualBuffers
from fedring.simulation.checks import (
    check_batch,
    check_data_root,
    check_engine,
    check_enough,
    check_given_labels,
    check_length,
    check_numbers,
    check_time,
    job_of,
    make_folder,
)
from fedring.simulation.clock import TimedAnswer, VirtualRounds
from fedring.simulation.engine import Engine, EvaluationFailed, Local
from fedring.simulation.groups import groups_of, groups_that_count, short_of
from fedring.simulation.objects import LocalObjects
from fedring.simulation.report import SimulationReport, following
from fedring.simulation.samples import Batching, Setup, client_id, labels_of_client
from fedring.simulation.secret import secret_of_seed
from fedring.simulation.server import RUN_ID, Row, SimulatedServer, Work
from fedring.simulation.timing import Pace, Timing, pace_of, timing_of
from fedring.simulation.vectors import ClientSections
from fedring.simulation.worker import Order, Outcome, Own, SampleAccounts, Turn
from fedring.train.device import threads_for
from fedring.train.errors import SeamError
from fedring.train.evaluation import NO_SAMPLES, Counts
from fedring.train.jobs.job import Job
from fedring.train.jobs.override_table import overrides_of, with_overrides
from fedring.train.metrics import combine, with_origin
from fedring.train.orders.commands import client_command
from fedring.train.plan import batches_in
from fedring.train.tensors.files import save_vectors
from fedring.v1 import federation_pb2 as pb

Show = Callable[[float, Row | None], None]
"""Takes the share of the work that is done, from 0 to 1, and the row of the last round that has ended, if any has."""

log = logging.getLogger(__name__)

BATCH_MB = 512
"""The most memory of the clients that a worker trains at once, unless another one is given."""

_EPOCH = 1
_GRACE = ServerConfig.model_construct().lost_after_seconds  # which does not read the environment
_WARNINGS = 10  # the most sentences on the evaluation of a round


def simulate(
    job: Job | Mapping[str, Any] | str | Path = MappingProxyType({}),
    *,
    clients: int,
    per_round: int | None = None,
    seed: int | None = None,
    secret: bytes | None = None,
    workers: int | None = None,
    threads: int | None = None,
    data_root: str | Path | None = None,
    device: str = "auto",
    engine: str = "local",
    labels: Sequence[Mapping[str, str]] = (),
    batch_mb: int = BATCH_MB,
    timing: Mapping[str, Any] | str | Path | None = None,
    out: str | Path | None = None,
    show: Show | None = None,
    **keys: Any,
) -> SimulationReport:
    """Run a job with simulated clients, and return its report.

    The modules that the job names are imported, in this process and in the workers. In a notebook, the cell shows the
    progress.

    Args:
        job: The job, its keys, or the .toml or .json file that holds them. In the place of a name there may be the
            function or class itself.
        clients: The number of clients, among whom the training samples are divided as the job says.
        per_round: The clients that are drawn for a round; None = as the job says.
        seed: In the place of the job's seed; None = as the job says.
        secret: From which the clients' secrets follow (`client_secret`), at least 32 bytes; None = from the job's seed.
        workers: Processes that train; None = one for each core, but 1 if the job has functions or classes that other
            processes cannot import. One worker trains in this process.
        threads: With which torch computes in each worker; None = the worker's share of the cores.
        data_root: Folder of the data sets.
        device: Where to train: auto, cpu, cuda or cuda:N.
        engine: How clients are trained: local (one by one, in processes of this machine), batched (many at once, with
            torch.func.vmap), auto (batched, or local if the job cannot be batched), or ray (one by one, in actors on a
            Ray cluster).
        batch_mb: The most memory of the clients that a worker trains at once, in MB.
        labels: The labels of the clients, which take them in turns: of two, client-0 has the first, client-1 the
            second, client-2 the first again. Empty = they have none.
        timing: How long clients take, as keys or the .toml or .json file that holds them (docs/simulation.md): rounds
            go by virtual time then. None = nothing takes time, and the job's keys about waiting have no effect.
        out: Folder for report.json and model.safetensors, which is made. None = the report is only returned.
        show: Is called after each client, in the place of a notebook's view.
        keys: Further keys of the job, which take precedence over those of `job`.

    Returns:
        The report, a dictionary: `rounds`, a row for each round with the figures that `flctl try` has, at most 10
        sentences as `failures`, and `warnings` on its evaluation, if there are any; `accuracy` and `loss` of the last
        model; its `parameters` and `model_sha256`; and figures of the simulation (docs/simulation.md).

    Raises:
        ConfigError, Failure: With one sentence for people; `exit_code` of a Failure is 78 if the input is wrong.
    """
    objects = LocalObjects()
    spec = job_of(job, keys, objects, per_round=per_round, seed=seed)
    root = Path(data_root).absolute() if data_root else None
    check_engine(engine)
    check_batch(batch_mb)
    count = objects.count_workers(workers, engine)
    check_numbers(spec, clients, count, threads)
    check_data_root(root)
    check_length(secret)
    given = check_given_labels(spec, clients, labels)
    times = None if timing is None else timing_of(timing, clients)
    check_time(spec, timed=times is not None)
    if out:
        make_folder(Path(out))
    trusted, used = tuple(spec.code), secret_of_seed(spec.seed) if secret is None else secret
    batching = Batching(batch_mb * 10**6, engine == "batched") if engine in ("batched", "auto") else None
    setup = Setup(
        spec,
        clients,
        root,
        trusted,
        device,
        threads or threads_for(count),
        used,
        given,
        batching,
        objects=objects.by_name,
    )
    try:
        # All checks are over: a simulation may take hours, and must not end with an error that was known before.
        with _shown(spec, show) as shown:
            report = SimulationReport(_simulate(setup, count, engine, times, out, shown), spec)
        if out:
            (Path(out) / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise Failure(f"the simulation cannot go on: {error}") from error
    return report


@contextmanager
def _shown(job: Job, show: Show | None) -> Iterator[Show]:
    """Yield `show`, or a function that updates a notebook's view.

    Elsewhere, it does nothing.
    """
    if show is None and (live := live_view()) is not None:
        with following(job, live) as follower:
            yield follower
    else:
        yield show or (lambda share, row: None)


def _simulate(
    setup: Setup, count: int, engine: str, timing: Timing | None, out: str | Path | None, show: Show
) -> dict[str, Any]:
    spec, clients = setup.job, setup.clients
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=".simulation-", dir=out)))
        server = SimulatedServer(spec, setup, folder, stack)
        server.check()
        running = stack.enter_context(_engine(engine, setup, count))
        if running.why_exact:
            log.warning("clients are trained one by one: %s", running.why_exact)
        check_enough(spec, clients, sum(size > 0 for size in running.sizes))
        stack.enter_context(_old_objects_apart())
        began = time.perf_counter()
        run = _Run(setup, server, running, timing, folder, show)
        run.run(stack)
        report = run.report(Path(out) if out else folder)
        together = setup.batching is not None and not running.why_exact
        report |= {"workers": count, "batched": together, "seconds": time.perf_counter() - began}
        report["updates_per_second"] = report["updates"] / report["seconds"]
    return report


@contextmanager
def _old_objects_apart() -> Iterator[None]:
    """Keep the objects of before out of garbage collections.

    Torch's modules have hundreds of thousands. A round makes so many objects of its own that all of them would be gone
    through in each, which takes as long as to train a dozen small clients.
    """
    if gc.get_freeze_count():  # the program does so itself
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _engine(name: str, setup: Setup, workers: int) -> Engine:
    if name == "ray":
        from fedring.simulation.ray_engine import Actors

        return Actors(setup, workers)
    return Local(setup, workers)


class _Run:
    """The rounds of one simulation."""

    def __init__(
        self,
        setup: Setup,
        server: SimulatedServer,
        engine: Engine,
        timing: Timing | None,
        folder: Path,
        show: Show,
    ) -> None:
        self._setup, self._job, self._server, self._engine = setup, setup.job, server, engine
        self._folder, self._show = folder, show
        self._candidates = sorted(client_id(client) for client, size in enumerate(engine.sizes) if size)
        self._labels = {client_id(client): labels_of_client(client, setup) for client in range(setup.clients)}
        self._rules = rules_of(setup.job, grace=0.0)
        self._paces = {name: pace_of(timing, name, setup.job.seed) for name in self._candidates if timing}
        self._virtual = _clock_of(setup.job, self._paces, timing) if timing else None
        self._waiting: dict[str, Outcome] = {}  # of clients whose answers come in a later round
        self._drawn: set[str] = set()
        self._rows: list[Row] = []
        self._history = deque[PastRound](maxlen=HISTORY)
        self._accounts = SampleAccounts()
        self._failed: dict[int, int] = {}  # how many trainings of a client have failed in a row, without being told
        self._counted: dict[int, int] = {}  # for how many samples a client's last update counted

    def run(self, stack: ExitStack) -> None:
        """Run all rounds.

        Raises:
            Failure: Too many rounds were abandoned in a row, or the simulation cannot go on.
        """
        try:
            self._model = self._server.first()
            self._schema, self._vectors = self._server.read(self._model)
            size = self._schema.num_parameters
            self._kept = stack.enter_context(ClientSections(self._folder / "kept", size))
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
            **({"virtual_seconds": self._virtual.now} if self._virtual else {}),
            **({"sample_epsilon": self._accounts.epsilon(table.delta)} if (table := self._job.sample_dp) else {}),
        }

    def _run_rounds(self) -> None:
        abandoned, models = 0, list[ModelRow]()
        for number in range(1, self._job.rounds + 1):
            if self._overspent(len(models) + 1):
                return
            work = self._work(number)
            row = work.row()
            row["download_bytes"] = self._download_bytes(work.command)
            abandoned = abandoned + 1 if work.reason else 0
            if work.reason:
                self._server.abandon(work)
            else:
                if self._is_evaluated(number):
                    self._evaluate(row)
                models.append(replace(self._model, metrics=row["metrics"]))
            self._rows.append(row)
            self._history.append(work.past(row))
            self._show(number / self._job.rounds, row)
            if abandoned >= min(self._job.max_abandoned, self._job.rounds):
                because = f": {work.failures[0]}" if work.failures else ""
                raise Failure(f"round {number} is abandoned, because {work.why}{because}".rstrip("."))
            if not work.reason and number >= self._job.min_rounds and self._server.no_better(models):
                return

    def _is_evaluated(self, number: int) -> bool:
        """Return whether a round's model is evaluated, if any is."""
        table, count = self._job.asynchronous, self._model.version - 1
        return table is None or number == self._job.rounds or count % table.evaluate_every == 0

    def _download_bytes(self, command: pb.TrainCmd) -> int:
        """Return the size of the round's model in full."""
        copies = 2 if command.control.digest else 1  # of the parameters: c is as large as they are
        return 4 * copies * self._schema.num_parameters + 8 * self._schema.num_buffers

    def _overspent(self, rounds: int) -> bool:
        """Return whether so many rounds would exceed dp.max_epsilon.

        Then the job ends before. Only published rounds are counted.

        Raises:
            Failure: It would end before its first round.
        """
        budget = self._job.budget
        if budget is None or not budget.max_epsilon:
            return False
        most = transforms_of(self._job).most_charged(self._job, self._schema.num_parameters)
        spent = epsilon([most] * rounds, budget.delta)
        if spent > budget.max_epsilon and not self._rows:
            text = f"dp.max_epsilon = {budget.max_epsilon:g} is less than {spent:.3g}, the epsilon of one round"
            raise Failure(text, Exit.CONFIG)
        return spent > budget.max_epsilon

    def _work(self, number: int) -> Work:
        """Run a round, and make its model if possible."""
        work = Work(number, self._job)
        try:
            chosen = self._server.settings(self._history)
        except (StrategyError, SeamError) as error:
            work.reason, work.why = error.reason, str(error)
            return work
        # From here on, the round has the job as the strategy has changed it.
        work.job = with_settings(self._job, chosen)
        self._train(work)
        if work.reason:
            return work
        work.settings |= chosen
        delivered = (update.client_id for update in work.updates)
        work.sums = groups_that_count(work.groups, delivered, work.command, self._schema.num_parameters)
        if len(work.updates) < self._rules.min_to_aggregate:
            work.reason = "too_few_clients"
            work.why = f"{len(work.updates)} of {counted(work.selected, 'client')} delivered an update"
        elif work.sums is not None and (why := short_of(work.job, work.sums)):
            work.reason, work.why = "too_few_to_unmask", why
        else:
            self._publish(work)
        return work

    def _train(self, work: Work) -> None:
        number, rules = work.number, rules_of(work.job, grace=_GRACE)
        row = RoundRow(number, 1, number, Phase.TRAINING, 0.0)
        work.command = command = round_command(work.job, row, self._model, run_id=RUN_ID, epoch=_EPOCH, most_bytes=0)
        self._server.command(work.job, command, self._model)
        if isinstance(self._virtual, VirtualBuffers):
            return self._fill(self._virtual, rules, work)
        if self._virtual is None:
            # Without time nobody drops out, so that no more are drawn than are needed.
            exact = replace(rules, select_factor=1.0)
            names = machine.sample(self._candidates, Round(number, exact, Phase.WAITING, 0.0))
        elif not (names := self._virtual.begin(number, rules)):
            work.times = self._virtual.abandoned()
            work.reason = "barrier_timeout"
            work.why = f"fewer than {counted(rules.min_clients, 'client')} came within {rules.barrier_timeout:g} s"
            return
        drawn, work.selected = names, len(names)
        # The draw comes first, as on a server, so that clients that stopped do not change the others that are drawn.
        names, stopped = self._those_who_go_on(names)
        work.failures += stopped
        work.groups = groups_of(work.job, names, command.seed)
        peers = {client: len(group) for group in work.groups for client in group}
        work.settings = {key: getattr(command, key) for key in work.job.scheduled}
        self._drawn.update(names)
        places = overrides_of({name: self._labels[name] for name in names}, work.job.override)
        work.told = {name: with_overrides(work.job, each) for name, each in places.items()}
        control = self._server.read_control(self._model) if command.control.digest else None
        order, done = Order(command.SerializeToString(), self._vectors, len(names), control), len(stopped)
        outcomes: dict[str, Outcome] = {}  # that wait until it is known whose updates count
        for outcome in self._outcomes(order, self._turns(names, peers, work)):
            if self._virtual is None:
                self._take(outcome, work)
            else:
                outcomes[client_id(outcome.client)] = outcome
            done += 1
            share = done / work.selected
            self._show((number - 1 + share) / self._job.rounds, self._rows[-1] if self._rows else None)
        if self._virtual is not None:
            self._close(self._virtual, drawn, outcomes, work)

    def _fill(self, virtual: VirtualBuffers, rules: RoundRules, work: Work) -> None:
        """Let clients train until there are enough updates for the next version."""
        number = work.number
        for clients in virtual.fill(number, self._model.version - 1, rules):
            names, stopped = self._those_who_go_on(sorted(clients))
            work.failures += stopped
            self._drawn.update(names)
            places = overrides_of({name: self._labels[name] for name in names}, work.job.override)
            work.told |= {name: with_overrides(work.job, each) for name, each in places.items()}
            order = Order(work.command.SerializeToString(), self._vectors, len(names))
            trained = {client_id(each.client): each for each in self._outcomes(order, self._turns(names, {}, work))}
            # A delta may be a row of all those that were trained together, which would stay in memory with it.
            self._waiting |= {
                name: each if each.delta is None else replace(each, delta=each.delta.copy())
                for name, each in trained.items()
            }
            virtual.expect({name: self._answer(name, trained.get(name), work) for name in sorted(clients)})
            work.selected += len(clients)
        work.times, work.reason = virtual.times, virtual.reason
        work.why = "nobody was there, or at work, who could fill the buffer" if work.reason else ""
        for name, staleness in virtual.staleness.items():
            self._take(self._waiting.pop(name), work)
            work.updates[-1] = replace(work.updates[-1], buffer=number, staleness=staleness)
        for name in virtual.failed:
            if name in self._waiting:
                self._take(self._waiting.pop(name), work)
        for name in work.times.left_out:
            del self._waiting[name]
        self._show(number / self._job.rounds, self._rows[-1] if self._rows else None)

    def _close(self, virtual: VirtualRounds, drawn: list[str], outcomes: Mapping[str, Outcome], work: Work) -> None:
        """Let the round's rules say which outcomes count, and take them.

        All clients have trained by now, since the bytes of an update, and so its time, are only known then.
        """
        answers = {name: self._answer(name, outcomes.get(name), work) for name in drawn}
        work.times = times = virtual.finish(answers)
        for name in (*times.delivered, *sorted(times.failed & outcomes.keys())):
            self._take(outcomes[name], work)

    def _outcomes(self, order: Order, turns: Iterator[Turn]) -> Iterator[Outcome]:
        """Yield the outcomes of turns, and charge their samples.

        A client charges its samples before it trains, whatever becomes of its update.
        """
        for outcome in self._engine.train(order, turns):
            self._accounts.charge(outcome)
            yield outcome

    def _answer(self, name: str, outcome: Outcome | None, work: Work) -> TimedAnswer:
        """Return the answer of a client, with its time.

        Without an outcome it has stopped, and says so at once.
        """
        if outcome is None:
            return TimedAnswer(0.0, delivers=False)
        command, size = work.command, self._engine.sizes[outcome.client]
        if name in work.told:
            command = client_command(command, work.told[name])
        steps = command.epochs * batches_in(min(size, command.subset_size or size), command.batch_size)
        seconds = self._paces[name].seconds(
            down=command.ByteSize() + self._download_bytes(command),
            steps=2 * steps if self._job.personal else steps,  # those of the client's own model, too
            up=outcome.update.total_bytes if outcome.update else 0,
        )
        return TimedAnswer(seconds, delivers=outcome.update is not None)

    def _turns(self, names: list[str], peers: Mapping[str, int], work: Work) -> Iterator[Turn]:
        """Yield the turns of the clients.

        Their state is read only when it is needed.
        """
        for client, name in ((int(name.rpartition("-")[2]), name) for name in names):
            group, samples = peers.get(name, 0), self._counted.get(client, 0)
            own = client_command(work.command, work.told[name]).SerializeToString() if name in work.told else b""
            yield Turn(client, self._kept.get(client), self._accounts.of(client), group, samples, own)

    def _those_who_go_on(self, names: list[str]) -> tuple[list[str], list[str]]:
        """Return the clients that go on, and a sentence for each other."""
        most = SitePolicy.model_validate({}).max_failed_rounds
        stopped = {client_id(client) for client, failed in self._failed.items() if failed >= most}
        why = f"has failed in {most} rounds in a row, and takes no further part"
        return [name for name in names if name not in stopped], [f"{name} {why}" for name in names if name in stopped]

    def _take(self, outcome: Outcome, work: Work) -> None:
        if outcome.failure:
            work.failures.append(outcome.failure)
        if outcome.update is None:
            return
        self._failed[outcome.client] = 0 if outcome.samples else self._failed.get(outcome.client, 0) + 1
        self._counted[outcome.client] = outcome.samples or self._counted.get(outcome.client, 0)
        work.updates.append(outcome.update)
        if outcome.delta is not None:
            work.deltas[outcome.update.client_id] = outcome.delta
        self._kept.put(outcome.client, outcome.kept)

    def _publish(self, work: Work) -> None:
        """Make the next model, or note why that is impossible."""
        try:
            self._model = self._server.next(self._model, work)
        except (CodecError, OptimizerError, RuleError, SeamError, RuntimeError) as error:  # the last is torch's
            work.reason = getattr(error, "reason", "bad_optimizer")
            work.why = f"no model can be made of the updates: {error}"
        else:
            _, self._vectors = self._server.read(self._model)
        work.deltas.clear()  # so that the next round's are not in memory beside them

    def _evaluate(self, row: Row) -> None:
        began = time.perf_counter()
        warnings: list[str] = []
        try:
            row["metrics"] |= with_origin("server", self._server.metrics(self._model))
        except (StrategyError, SeamError) as error:
            warnings.append(str(error))
        self._count(row, warnings)
        row["evaluate_seconds"] = time.perf_counter() - began
        if warnings:
            row["warnings"] = list(dict.fromkeys(warnings))[:_WARNINGS]

    def _count(self, row: Row, warnings: list[str]) -> None:
        """Evaluate the newest model, and its clients' own ones.

        Args:
            row: Gets the figures.
            warnings: Get a sentence on everything that fails.
        """
        job, apart = self._job, self._job.evaluate_on_server and self._server.loads_its_own
        if apart:
            _tell(row, ["server"], _counts(lambda: self._server.evaluate(self._model), warnings))
        origins = {"eval": job.evaluate, "server": job.evaluate_on_server and not apart}
        if wanted := [origin for origin, asked in origins.items() if asked]:
            _tell(row, wanted, _counts(lambda: self._engine.evaluate(self._vectors), warnings))
        if self._job.evaluate and self._job.personal:
            kept = ((client, self._kept.section(client, PERSONAL)) for client in range(self._setup.clients))
            owns = (Own(client, section.tensors) for client, section in kept if section is not None)
            evaluated = list(self._engine.evaluate_own(owns))
            warnings += [warning for own, _ in evaluated for warning in own.warnings]
            row["metrics"] |= with_origin("eval", combine((own.total, figures) for own, figures in evaluated))


def _clock_of(job: Job, paces: Mapping[str, Pace], timing: Timing) -> VirtualRounds:
    """Return the rounds of a job in virtual time."""
    if job.asynchronous is not None:
        return VirtualBuffers(paces, timing.availability, job.asynchronous)
    return VirtualRounds(paces, timing.availability)


def _counts(evaluate: Callable[[], Counts], warnings: list[str]) -> Counts:
    """Return the counts of an evaluation, which may fail.

    Args:
        evaluate: Makes it.
        warnings: Get a sentence on everything that fails.
    """
    try:
        counts = evaluate()
    except (EvaluationFailed, ServerEvaluationFailed) as error:
        warnings.append(str(error))
        return Counts()
    warnings += counts.warnings if counts.total else [NO_SAMPLES]
    return counts


def _tell(row: Row, origins: Iterable[str], counts: Counts) -> None:
    """Write the figures of an evaluation into the row of its round."""
    row["accuracy"], row["loss"] = counts.accuracy, counts.loss
    for origin in origins:
        row["metrics"] |= with_origin(origin, counts.metrics, accuracy=counts.accuracy, loss=counts.loss)
