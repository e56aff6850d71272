"""The model that a job starts from.

It is decided once, when the job starts, and noted with the job. A restarted server goes on from there.
"""

import secrets
from dataclasses import replace

from fedring.server.model.models import Models
from fedring.server.running.opening import RunningJob
from fedring.server.running.rounds import Rounds
from fedring.server.state.facts import Facts
from fedring.server.state.failures import StorageError
from fedring.server.state.ratings import best_of
from fedring.server.state.rows import JobRow, ModelRow
from fedring.train.bounds import MAX_SEED
from fedring.train.jobs.job import Job
from fedring.train.jobs.start import BEST, FRESH, NEWEST, is_path, version_of
from fedring.train.metrics import result_of

_ALL = 1_000_000_000


class JobStarter:
    """Finds the models that jobs and their rounds start from."""

    def __init__(self, rounds: Rounds, facts: Facts, models: Models) -> None:
        self._rounds, self._facts, self._models = rounds, facts, models

    async def begin(self, row: JobRow, spec: Job) -> tuple[RunningJob, str]:
        """Decide the first model of a job, and make it available.

        Returns:
            The job with its seed, and a clause that says what it starts from.

        Raises:
            StorageFailed: if the disk refuses it. What was noted by then holds for the next attempt.
            StorageError, SeamError: if the job cannot start from there.
        """
        await self._facts.heavy(self._models.load)
        base, spec, text = await begin(self._facts, self._models, row, spec)
        frozen = await self._facts.heavy(self._models.maker.job_models.frozen_digest, spec, base)
        noted = await self._facts.db(self._facts.store.jobs.get, row.job_id)  # with the start of its line of models
        self._rounds.learn(base)
        return RunningJob(noted or row, spec, frozen), text

    async def base_of(self, job: RunningJob) -> ModelRow:
        """Return the base of the job's next round.

        The samples to evaluate its model on are loaded, too.

        Raises:
            StorageError: "unknown_model", if the model is not kept any more.
            SeamError: if there are no samples.
        """
        base = await base_of(self._facts, self._models, job.row)
        if job.spec.evaluate_on_server:
            await self._facts.heavy(self._models.maker.test_set.load, job.spec)
        return base


async def begin(facts: Facts, models: Models, job: JobRow, spec: Job) -> tuple[ModelRow, Job, str]:
    """Decide from which model a job starts, or continues after a restart.

    A new model is published. What was decided is durable when this returns.

    Returns:
        The model, the job with its seed, and a clause that says which model it is.

    Raises:
        StorageError: if the version that the job names is not kept, or is damaged.
        SeamError: if the version or the file does not fit the job, or no model can be made.
    """
    if (known := await _last_of(facts, job)) is not None:
        noted = await facts.db(_as_noted, facts, job, spec)
        return known, noted, f"goes on from version {known.version}"
    rows = await facts.db(facts.store.models.newest, _ALL)
    wanted, why = await _find(facts, models, spec, rows)
    seeded = await facts.db(_with_seed, facts, spec, wanted) if spec.seed_is_open else spec
    if seeded is not spec:
        job = replace(job, spec=seeded.model_dump(mode="json"))
    if wanted is None:
        async with facts.new_version() as version:
            path = spec.start if is_path(spec.start) else ""
            made = await facts.heavy(models.maker.first, seeded, version, path)
            why = f"starts {f'from {path}' if path else 'fresh'}, as version {version}"
            wanted = replace(made, job_id=job.job_id)
            await facts.db(facts.commit_model, wanted, _note, facts, job, wanted, rows, wanted)
    elif not await facts.db(_note_kept, facts, job, wanted, rows):
        return await begin(facts, models, job, spec)
    await facts.work(models.versions.remember, wanted)  # one that was damaged when the server started is not known yet
    return wanted, seeded, why


def _as_noted(facts: Facts, job: JobRow, spec: Job) -> Job:
    """Return a job with the seed that was noted with it.

    An attempt that the disk has refused may have chosen one after the caller read the job.
    """
    row = facts.store.jobs.get(job.job_id) if spec.seed_is_open else None
    return spec if row is None else Job.model_validate(row.spec)


def _note_kept(facts: Facts, job: JobRow, base: ModelRow, rows: list[ModelRow]) -> bool:
    """Do as `_note` if the version is still there.

    Returns whether it is. The rounds of other jobs may have removed it since it was chosen; once it is noted, they do
    not.
    """
    if facts.store.models.get(base.version) is None:
        return False
    _note(facts, job, base, rows, None)
    return True


def _note(facts: Facts, job: JobRow, base: ModelRow, rows: list[ModelRow], first: ModelRow | None) -> None:
    """Note durably where a job and its line of models start.

    `first` is the base, if it is new.
    """
    store = facts.store
    newest = next((row for row in rows if row.schema_hash == base.schema_hash), None)
    after = _residuals_end(facts, base, newest)
    # Two jobs that run at once have two lines, also if they start from the same version: clients keep what updates
    # have left out by their lines.
    others = (row for row in store.jobs.running() if row.job_id != job.job_id and row.start_version)
    if after in {(row.residual_epoch, row.residual_after) for row in others}:
        after = store.epoch, store.rounds.skip(job.job_id)
    store.jobs.begin(job, base.version, after, first)


async def base_of(facts: Facts, models: Models, job: JobRow) -> ModelRow:
    """Return the model from which a job's next round starts.

    It is the newest that the job has published, or else its first.

    Raises:
        StorageError: "unknown_model", if it is not kept any more.
    """
    base = await _last_of(facts, job)
    if base is None:
        raise StorageError("unknown_model", f"the model of job {job.job_id} is gone: start a job anew")
    await facts.work(models.versions.remember, base)
    return base


async def _last_of(facts: Facts, job: JobRow) -> ModelRow | None:
    """Return a job's newest model, or else the one it started from.

    None before either exists.
    """
    mine = await facts.db(facts.store.models.newest, 1, job.job_id)
    if mine:
        return mine[0]
    row = await facts.db(facts.store.jobs.get, job.job_id)
    return await facts.db(facts.store.models.get, row.start_version) if row and row.start_version else None


async def _find(facts: Facts, models: Models, spec: Job, rows: list[ModelRow]) -> tuple[ModelRow | None, str]:
    """Return the kept version from which a job starts.

    None, with a reason, if a new one must be made.
    """
    if spec.start == FRESH or is_path(spec.start):
        return None, ""
    if version := version_of(spec.start):
        wanted = next((row for row in rows if row.version == version), None)
        if wanted is None:
            raise StorageError("unknown_model", f"start = {version}: no such version is kept (`flctl models list`)")
        await facts.heavy(models.maker.job_models.check_fits, wanted, spec)
        return wanted, f"starts from version {version}"
    schema = await facts.heavy(models.maker.job_models.schema_of, spec)
    alike = [row for row in rows if row.schema_hash == schema.hash.hex()]
    if spec.start == NEWEST:
        return (alike[0], f"starts from version {alike[0].version}, the newest") if alike else (None, "")
    best = best_of(alike, spec.best_by)
    if best is None:
        what = f"has {spec.best_by.split()[1]}, which best_by names" if spec.best_by else "was evaluated"
        why = f"none of this model's versions {what}" if alike else "there is no version of this model yet"
        raise StorageError("unknown_model", f'start = "{BEST}": {why}: use start = "{NEWEST}" or "{FRESH}"')
    return best, f"starts from version {best.version}, the best ({result_of(best.metrics, spec.best_by)})"


def _with_seed(facts: Facts, spec: Job, wanted: ModelRow | None) -> Job:
    """Return a job with its base's seed, or a new one.

    Frozen tensors follow from the seed, so a version is continued with the seed of its own job.
    """
    publisher = facts.store.jobs.get(wanted.job_id) if wanted is not None else None
    seed = secrets.randbelow(MAX_SEED + 1) if wanted is None else spec.seed
    if publisher is not None:
        seed = publisher.spec.get("seed", seed)
    return spec.model_copy(update={"seed": seed})


def _residuals_end(facts: Facts, base: ModelRow, newest: ModelRow | None) -> tuple[int, int]:
    """Return the last round whose residuals a new job cannot use.

    It is given by its epoch and its number; the job starts from `base`.

    A residual is what updates have left out of the models so far. It still belongs to `newest`, the newest model with
    this schema, and to those that follow it, and to no other. So does what clients keep to themselves. All jobs that
    continue one another's newest models have the same round here. The number is 0 if there is no such round.
    """
    if newest is not None and base.version == newest.version:
        publisher = facts.store.jobs.get(newest.job_id)
        return (publisher.residual_epoch, publisher.residual_after) if publisher else (0, 0)
    rounds = facts.store.rounds.newest(1)
    return facts.store.epoch, rounds[0].round if rounds else 0
