"""Making models: a job's first one, and each next one.

The next one is made from the updates of a round.
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from fedring.codec import Reader
from fedring.codec.errors import CodecError
from fedring.server.aggregation.aggregate import AggregationPlan, aggregate, store_model, store_parts
from fedring.server.aggregation.combining import Combination
from fedring.server.aggregation.contributions import Contribution, reader_of
from fedring.server.aggregation.modelfile import ModelReader
from fedring.server.aggregation.rule import RuleError
from fedring.server.aggregation.steps import BaseFiles
from fedring.server.aggregation.strategy import PastRound, Strategy, ask_metrics, ask_settings, make_strategy
from fedring.server.aggregation.versions import ModelVersions
from fedring.server.aggregation.walk import CallersThread
from fedring.server.config import ServerConfig
from fedring.server.model.initial import find_file, load_initial
from fedring.server.model.job_models import SEEDED, JobModels
from fedring.server.model.own_update import OwnUpdates
from fedring.server.model.testset import TestSet
from fedring.server.model.transforms.listing import RoundSteps, transforms_of
from fedring.server.model.transforms.transform import ClosedRound
from fedring.server.state.blob_interfaces import Blobs
from fedring.server.state.checked import CheckedReader, find_damage
from fedring.server.state.failures import DamagedBlob, DamagedUpdates, StorageError
from fedring.server.state.rows import ModelRow, UpdateRow
from fedring.train.jobs.job import Job
from fedring.train.names.offered import Offered, collect
from fedring.train.tensors.skeleton import initialize
from fedring.train.tensors.state import frozen_digest, read_vectors, write_vectors
from fedring.v1 import federation_pb2 as pb


class ModelMaker:
    """Makes the models of a run, and seals their blobs.

    All methods may take long.

    Args:
        blobs: takes the models.
        executor: computes several tiles at a time.
        config: says what is trusted, and where the first weights are.
        run_id: goes into the model files, for people.
        versions: the versions that are available.
        offered: what jobs may name; None = what the configuration trusts, which is imported.

    Attributes:
        offered: what jobs may name here.
        job_models: builds the models of jobs.
        test_set: evaluates models on a job's test set.

    Raises:
        SeamError: if something that is trusted cannot be imported.
    """

    def __init__(
        self,
        blobs: Blobs,
        executor: Executor,
        config: ServerConfig,
        run_id: str,
        versions: ModelVersions,
        *,
        offered: Offered | None = None,
    ) -> None:
        self._blobs, self._executor, self._config, self._run_id = blobs, executor, config, run_id
        self._versions = versions
        self.offered = offered or collect(config.trusted, root=config.data_root, download=config.download)
        self.job_models = JobModels(self.offered)
        self.test_set = TestSet(blobs, config.data_root, self.offered)
        self._own = OwnUpdates(config.data_root, self.offered)

    def check_file(self, job: Job, path: str = "") -> None:
        """Check that a job can start anew, or from a file.

        Raises:
            SeamError: if the file may not be named or cannot be read, or does not fit the job's model.
        """
        if (file := self._file_of(path)) is not None:
            load_initial(file, *self.job_models.build(job))

    def first(self, job: Job, version: int, path: str = "") -> ModelRow:
        """Make the first model of a line of versions.

        Args:
            job: says how the model is built, with which seed.
            version: of the new model.
            path: of a file with its weights; empty = those of the configured `init_path`, if that is a file.

        Raises:
            SeamError: if the model cannot be built, or if the file may not be named, cannot be read or does not fit.
            StorageError: if the new model cannot be kept.
        """
        file = self._file_of(path)
        if file is None and job.training.by_module:
            return self._first_by_module(job, version)
        model, parts = self.job_models.build(job)
        if file is not None:
            load_initial(file, model, parts)
        values = read_vectors(model, parts.shared.names)
        new = store_model(parts.shared, values, self._blobs, {"run_id": self._run_id})
        row = new.row(parts.shared, version=version, number=0)
        return replace(row, frozen_digest=frozen_digest(model, parts.frozen))

    def _first_by_module(self, job: Job, version: int) -> ModelRow:
        with SEEDED:
            return self._initialized(job, version)

    def _initialized(self, job: Job, version: int) -> ModelRow:
        skeleton, tensors = self.job_models.skeleton(job)
        schema = tensors.shared
        # They are written in the order of the file: all buffers, and then all parameters.
        buffers = [tensor.double().reshape(-1).numpy() for _, tensor in initialize(skeleton, job.seed, "buffer")]
        whole = np.concatenate(buffers) if buffers else np.empty(0, np.float64)
        named = initialize(skeleton, job.seed, "parameter")
        parts = (tensor.detach().float().reshape(-1).numpy() for _, tensor in named)
        new = store_parts(schema, whole, parts, self._blobs, {"run_id": self._run_id})
        return new.row(schema, version=version, number=0)

    def command(self, job: Job, command: pb.TrainCmd, base: ModelRow) -> None:
        """Add the transforms' fields to the command of a round.

        Raises:
            DamagedModel: if a file of the base is damaged.
            StorageFailed: if it cannot be read now.
            SeamError: if the job names transforms that this server cannot make.
        """
        with ExitStack() as files:
            transforms_of(job).command(job, command, base, BaseFiles(self._blobs, self._versions, base, files))

    def prepare(self, closed: ClosedRound) -> RoundSteps:
        """Return the steps of the job's transforms for a closed round.

        Raises:
            RuleError: if the rule cannot combine so few updates, or the memory does not suffice.
            SeamError: if the job's strategy or transforms cannot be made.
            StorageFailed: if a secret of the round cannot be kept.
        """
        job, rule = closed.job, self.strategy(closed.job).rule
        if shortage := job.aggregation.too_few(closed.count):
            raise RuleError("too_few_clients", shortage)
        with _memory_for(closed):
            return transforms_of(job).close(closed, rule)

    def next(self, base: ModelRow, prepared: RoundSteps, version: int) -> ModelRow:
        """Make the model that a round publishes.

        Args:
            base: the model that the round began with.
            prepared: the round, and what the transforms do to it, for this attempt only.
            version: of the new model.

        Returns:
            The row of the model, of which all blobs are sealed.

        Raises:
            DamagedModel: if a file of the base is damaged.
            DamagedUpdates: if updates are damaged; without them it may succeed.
            CodecError: if the model does not fit its format; BadSum, if the sum of a group cannot be right.
            RuleError: if the rule cannot combine these updates, or the memory does not suffice.
            SeamError, DataError: if the server's own samples or training, which a rule needs, cannot be loaded.
            OptimizerError: if the optimizer cannot be used.
            StorageError: if something cannot be read or kept.
        """
        closed = prepared.closed
        job, command, updates = closed.job, closed.command, closed.updates
        with ExitStack() as stack:
            stack.enter_context(_memory_for(closed, f" of {base.parameters:,} parameters"))
            own = self._own_update(base, job, command.job_round, command.seed) if job.aggregation.data else None
            files = BaseFiles(self._blobs, self._versions, base, stack)
            for step in prepared.steps:
                step.read(base, files)
            plan = AggregationPlan(
                Combination(prepared.rule, job.aggregation.bucketing, f"{closed.secret}{command.seed}", own=own),
                prepared.steps,
                {"run_id": self._run_id, "round": str(command.round)},
            )
            reader = ModelReader(files.open(base.blob))
            checked: list[tuple[UpdateRow, CheckedReader]] = []
            payloads: list[Reader] = []
            for row in updates:
                if row.client_id in closed.in_memory:  # it was checked when it came, and was on no disk since
                    payloads.append(reader_of(row.payload))
                    continue
                sent = files.payload(row)
                checked.append((row, sent))
                payloads.append(sent.read)

            def check() -> None:
                lost = [(row, damage) for row, sent in checked for damage in find_damage([sent])]
                judged = [self._blobs.judge(damage) for _, damage in lost]  # all copies are looked at together
                for damage in find_damage(files.opened):
                    raise self._versions.damage_of(base, damage)
                for error in judged:
                    if not isinstance(error, DamagedBlob):
                        raise error
                if lost:
                    raise DamagedUpdates((row, damage.what) for row, damage in lost)

            try:
                contributions = [
                    Contribution(row.client_id, 1.0, row.packets, read, values=closed.deltas.get(row.client_id))
                    for row, read in zip(updates, payloads, strict=True)
                ]
                # Code of the user's own may take for ever, and updates are checked in the shared threads.
                executor = CallersThread() if job.aggregation.own else self._executor
                new = aggregate(reader, contributions, self._blobs, executor, plan, check=check)
            except (CodecError, StorageError):
                check()  # because damaged bytes can cause any of these errors
                raise
            except RuleError as error:
                check()
                raise RuleError(error.reason, f"the rule {job.aggregation.rule} failed: {error}") from error
            return new.row(reader.schema, version=version, number=command.round, base=base)

    def strategy(self, job: Job) -> Strategy:
        """Make the job's strategy.

        Raises:
            SeamError: if a class of the user's own cannot be imported or made.
        """
        return make_strategy(job.aggregation, self.offered)

    def ask_settings(self, job: Job, history: Iterable[PastRound]) -> dict[str, float]:
        """Return the next round's settings by the job's own strategy.

        Args:
            job: the job.
            history: its rounds that are over, oldest first.

        Raises:
            SeamError: if the strategy cannot be made.
            StrategyError: if `configure` fails.
        """
        return ask_settings(self.strategy(job), job, history)

    def ask_metrics(self, row: ModelRow, job: Job) -> dict[str, float]:
        """Return the own strategy's figures of a version.

        Empty if it has no `evaluate`.

        Raises:
            SeamError: if the strategy or the model cannot be made.
            StrategyError: if `evaluate` fails.
            StorageError, CodecError: if the version cannot be read.
        """
        strategy = self.strategy(job)
        if strategy.evaluate is None:
            return {}
        model, _ = self.job_models.build(job)
        with self._blobs.reader(row.blob) as blob:
            checked = CheckedReader(blob.read, blob.size, row.blob)
            reader = ModelReader(checked)
            write_vectors(model, reader.schema, reader.vectors(), partial=True)
            checked.check()
        with torch.no_grad():
            return ask_metrics(strategy, model.eval())

    def check_samples(self, job: Job) -> None:
        """Check that the server's own samples can be loaded.

        The rule of a job may need them.

        Raises:
            SeamError, DataError: if they cannot.
        """
        if job.aggregation.data:
            with SEEDED:
                self._own.load(job)

    def _own_update(self, base: ModelRow, job: Job, job_round: int, seed: int) -> Contribution:
        try:
            with self._blobs.reader(base.blob) as blob:
                checked = CheckedReader(blob.read, blob.size, base.blob)
                reader = ModelReader(checked)
                schema, vectors = reader.schema, reader.vectors()
                checked.check()
        except (CodecError, StorageError) as error:
            raise self._versions.damage_of(base, error) from error
        with SEEDED:
            return self._own.make(self.job_models.build(job)[0], schema, vectors, job, job_round=job_round, seed=seed)

    def _file_of(self, path: str) -> Path | None:
        allowed = self._config.init_path
        return find_file(allowed, path) if path else allowed if allowed and allowed.is_file() else None


@contextmanager
def _memory_for(closed: ClosedRound, size: str = "") -> Iterator[None]:
    """Turn a lack of memory into the error of a round."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        rule, updates = closed.job.aggregation.rule, f"{len(closed.updates)} updates{size}"
        text = f"the server has too little memory to combine {updates} with the rule {rule}"
        raise RuleError("out_of_memory", text) from error


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error says that there is no memory.

    On the CPU, torch says so with a RuntimeError.
    """
    return isinstance(error, MemoryError) or "can't allocate memory" in str(error)
