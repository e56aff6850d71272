"""The model that a round publishes, its evaluation, and which models are kept."""

import logging
import time
from collections.abc import Set
from dataclasses import replace
from typing import Any

from fedring.codec import CodecError
from fedring.server.config import ServerConfig
from fedring.server.model.models import Models
from fedring.server.model.strategy import StrategyError
from fedring.server.model.testset import TestSet
from fedring.server.model.versions import files_of
from fedring.server.round.events import Phase
from fedring.server.round.open_round import OpenRound
from fedring.server.round.private_rounds import RoundPrivacy
from fedring.server.state.facts import Facts
from fedring.server.state.failures import StorageError, StorageFailed
from fedring.server.state.rows import EvaluationRow, ModelRow, RoundRow
from fedring.train.errors import SeamError
from fedring.train.metrics import with_origin

log = logging.getLogger(__name__)

_ALL = 1_000_000_000


async def publish(facts: Facts, models: Models, privacy: RoundPrivacy, open_: OpenRound) -> tuple[ModelRow, RoundRow]:
    """Make the next model of the accepted updates, and make it durable together with the end of its round.

    Args:
        facts: keeps the model.
        models: makes it.
        privacy: knows what the rounds before have spent.
        open_: the round.

    Raises:
        DamagedModel, DamagedUpdates: if what it is made of is damaged.
        StorageFailed: if the disk refuses it; nothing was changed.
        StorageError, CodecError, OptimizerError, RuleError, SeamError, RuntimeError: if it cannot be made; the last is
            torch's.
    """
    version = await facts.db(facts.store.next_version)
    closed = open_.closed(facts.store.secret, privacy.past_of(open_.row))
    open_.prepared = await facts.heavy(models.maker.prepare, closed)
    made = await facts.heavy(models.maker.next, open_.base, open_.prepared, version)
    ended = open_.ended(Phase.PUBLISHED, model_version=version)
    frozen = open_.command.job.frozen_digest
    model = replace(made, job_id=open_.row.job_id, metrics=ended.stats["metrics"], frozen_digest=frozen)
    try:
        await facts.db(facts.store.publish, model, ended, open_.prepared.charge())
    except StorageFailed:
        await facts.db(facts.discard, files_of(model))  # they take up the space that is missing
        raise
    return model, ended


async def evaluation(
    facts: Facts, models: Models, test_set: TestSet, open_: OpenRound, model: ModelRow
) -> tuple[dict[str, Any], EvaluationRow | None]:
    """Return the evaluation's figures for the round's row, and the sum of the clients' counts, if there are any."""
    stats = open_.stats(open_.row.stats["seconds"])
    if open_.job.aggregation.own:
        try:
            stats["metrics"] |= with_origin("server", await facts.heavy(models.maker.ask_metrics, model, open_.job))
        except (StrategyError, SeamError, StorageError, CodecError, MemoryError, RuntimeError) as error:
            log.warning("round %d has published, but: %s", open_.row.round, error, exc_info=error.__cause__)
            stats["warnings"] = [str(error) or "the server has too little memory to evaluate the model"]
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


async def prune(facts: Facts, models: Models, config: ServerConfig, bases: Set[int]) -> None:
    """Delete models, updates and rounds that are older than the configuration keeps, but not the versions `bases`."""
    keep = (config.keep_models, config.keep_update_rounds, config.keep_rounds, config.keep_jobs)
    await facts.db(facts.store.shorten_log)
    await facts.db(facts.blobs.forget_unnamed, config.unnamed_seconds)
    if await facts.db(facts.prune, *keep):
        kept = await facts.db(facts.store.models, _ALL)
        models.versions.forget({row.version for row in kept} | bases)
