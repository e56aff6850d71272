"""The model that a round publishes, its evaluation, and which models are kept."""

import time
from dataclasses import replace
from functools import partial
from typing import Any

from fedring.server.config import ServerConfig
from fedring.server.model.guards import guard
from fedring.server.model.models import Models
from fedring.server.model.testset import TestSet
from fedring.server.model.versions import files_of
from fedring.server.round.events import Phase
from fedring.server.round.open_round import OpenRound
from fedring.server.state.facts import Facts
from fedring.server.state.failures import StorageFailed
from fedring.server.state.rows import EvaluationRow, ModelRow, RoundRow
from fedring.train.job import Job
from fedring.train.metrics import with_origin

_ALL = 1_000_000_000
_AT_A_TIME = 2  # rounds that are read until one is found that published a model; their rows may be long


async def publish(facts: Facts, models: Models, open_: OpenRound) -> tuple[ModelRow, RoundRow]:
    """Make the next model of the accepted updates, and make it durable together with the end of its round.

    Raises:
        DamagedModel, DamagedUpdates: if what it is made of is damaged.
        StorageFailed: if the disk refuses it; nothing was changed.
        StorageError, CodecError, OptimizerError, RuleError, SeamError, RuntimeError: if it cannot be made; the last is
            torch's.
    """
    updates = [open_.accepted[client] for client in sorted(open_.accepted)]
    version = await facts.db(facts.store.next_version)
    last_median = await _last_median(facts, open_.job, open_.row.job_id)
    open_.guarded = guard(open_.job, updates, last_median, job_round=open_.row.job_round)
    make = partial(models.maker.next, seed=open_.command.seed, job_round=open_.row.job_round, guarded=open_.guarded)
    made = await facts.heavy(make, open_.base, updates, open_.job, open_.row.round, version)
    ended = open_.ended(Phase.PUBLISHED, model_version=version)
    model = replace(made, job_id=open_.row.job_id, metrics=ended.stats["metrics"])
    try:
        await facts.db(facts.store.publish, model, ended)
    except StorageFailed:
        await facts.db(facts.discard, files_of(model))  # they take up the space that is missing
        raise
    return model, ended


async def _last_median(facts: Facts, job: Job, job_id: int) -> float:
    """Return the median norm in the last round of the job that published a model; 0 = not known, or not needed."""
    rows = await facts.db(facts.store.rounds, _AT_A_TIME, job_id) if job.update_clip_factor else []
    while rows:
        for row in rows:
            if row.model_version:
                return float(row.stats.get("median_norm", 0.0))
        rows = await facts.db(facts.store.rounds, _AT_A_TIME, job_id, rows[-1].round)
    return 0.0


async def evaluation(
    facts: Facts, test_set: TestSet, open_: OpenRound, model: ModelRow
) -> tuple[dict[str, Any], EvaluationRow | None]:
    """Return the evaluation's figures for the round's row, and the sum of the clients' counts, if there are any."""
    stats = open_.stats(open_.row.stats["seconds"])
    if open_.job.evaluate_on_server and (counts := await facts.heavy(test_set.evaluate, model, open_.job)):
        stats |= {"server_accuracy": counts.accuracy, "server_loss": counts.loss}
        means = with_origin("server", counts.metrics, accuracy=counts.accuracy, loss=counts.loss)
        stats["metrics"] |= means
    stats["evaluate_seconds"] = time.monotonic() - open_.started - stats["seconds"]
    summed = await facts.db(facts.store.evaluation_sum, model.version)
    if summed is not None:
        stats |= {name: getattr(summed, name) for name in ("correct", "total", "loss_sum", "classified")}
        stats["metrics"] |= with_origin("eval", summed.metrics, accuracy=summed.accuracy, loss=summed.loss)
    return stats, summed


async def prune(facts: Facts, models: Models, config: ServerConfig, open_: OpenRound | None) -> None:
    """Delete models, updates and rounds that are older than the configuration keeps, except the base of `open_`."""
    keep = (config.keep_models, config.keep_update_rounds, config.keep_rounds, config.keep_jobs)
    if await facts.db(facts.prune, *keep):
        kept = await facts.db(facts.store.models, _ALL)
        base = {open_.base.version} if open_ else set()
        models.versions.forget({row.version for row in kept} | base)
