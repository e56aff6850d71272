"""The model of a closed round: made, published, evaluated."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fedring.codec import CodecError
from fedring.server.aggregation.rule import OptimizerError, RuleError
from fedring.server.aggregation.strategy import StrategyError
from fedring.server.group import machine as gr
from fedring.server.model.models import Models
from fedring.server.model.testset import EvaluationFailed
from fedring.server.round.dispatch import Dispatch
from fedring.server.round.events import OPEN, Abandoned, Lost, Phase, Published
from fedring.server.round.metrics import RoundMetrics
from fedring.server.round.open_round import OpenRound
from fedring.server.running.private_rounds import RoundPrivacy
from fedring.server.running.rounds import Rounds, abandon
from fedring.server.sessions.sessions import Sessions
from fedring.server.state.facts import Facts
from fedring.server.state.failures import DamagedModel, DamagedUpdates, StorageError, StorageFailed
from fedring.server.state.journal import printable
from fedring.server.state.rows import EvaluationRow, ModelRow, RoundRow
from fedring.train.errors import SeamError
from fedring.train.jobs.job import Job
from fedring.train.metrics import is_evaluated, result_of, with_origin

log = logging.getLogger(__name__)

_MOST_SENTENCES = 10  # on the evaluations of a round that have failed


class Publisher:
    """Makes the models of closed rounds, each with its own version."""

    def __init__(
        self,
        rounds: Rounds,
        facts: Facts,
        models: Models,
        privacy: RoundPrivacy,
        sessions: Sessions,
        metrics: RoundMetrics,
    ) -> None:
        self._rounds, self._facts, self._models, self._privacy = rounds, facts, models, privacy
        self._sessions, self._metrics = sessions, metrics
        self._dispatch = Dispatch(sessions)

    async def make(self, open_: OpenRound) -> None:
        """Make and publish the next model, or abandon the round.

        What can be mended, or waited for, makes it due again.
        """
        if open_.stop_reason and open_.phase is Phase.AGGREGATING:
            self._rounds.handle(open_, Abandoned(open_.stop_reason))
        if open_.phase is Phase.AGGREGATING:
            await self._make(open_)
        if open_.phase is Phase.AGGREGATING and not open_.stop_reason:
            await wait_for_disk(self._facts, open_)

    async def _make(self, open_: OpenRound) -> None:
        open_.making = True
        try:
            with self._metrics.aggregate_seconds.time():
                model, ended = await publish(self._facts, self._models, self._privacy, open_)
        except StorageFailed as error:
            log.warning("the model of round %d waits for the disk: %s", open_.row.round, error)
        except DamagedUpdates as error:
            await self._facts.keep(self._go_on_without, open_, error)
        except open_.kind.recoverable as error:
            log.error("round %d: %s", open_.row.round, error)
            open_.failures.insert(0, str(error))
            if not await self._facts.keep(open_.kind.recover, error):
                self._rounds.handle(open_, Abandoned(error.reason))
        except (RuleError, SeamError) as error:
            log.error("round %d makes no model: %s", open_.row.round, error, exc_info=error.__cause__)
            open_.failures.insert(0, str(error))
            self._rounds.handle(open_, Abandoned(error.reason))
        except (StorageError, CodecError, OptimizerError, RuntimeError) as error:  # torch raises RuntimeErrors
            log.error(
                "round %d makes no model: %s", open_.row.round, error, exc_info=not isinstance(error, StorageError)
            )
            if isinstance(error, DamagedModel):
                self._note_damage(open_, error)
            self._rounds.handle(open_, Abandoned(getattr(error, "reason", "bad_optimizer")))
        else:
            self._publish(open_, model, ended)
        finally:
            open_.making = False

    def _publish(self, open_: OpenRound, model: ModelRow, ended: RoundRow) -> None:
        """Tell everybody of the new model; it is durable.

        Clients are asked to evaluate it.
        """
        rounds = self._rounds
        open_.row, open_.made = ended, model
        rounds.learn(model)
        rounds.published_at[model.job_id] = time.time()
        self._metrics.guarded(ended.stats)
        self._models.versions.remember(model)
        here = self._sessions.here(open_.job.clients) if open_.job.evaluate else []
        evaluators = [client for client in here if rounds.turns.has_room(open_, client)]
        rounds.handle(open_, Published(frozenset(evaluators)))
        self.end_training(open_)
        for client in evaluators:
            self._dispatch.evaluate(open_, model, client)
        text = f"{open_.title} published model {model.version} in {ended.stats['seconds']:.2f} s"
        rounds.journal.tell(open_, "round_published", text)

    async def evaluated(self, open_: OpenRound, model: ModelRow) -> None:
        """Note the figures of the model that a round has published."""
        stats, summed = open_.row.stats, None
        if _is_evaluated_by_any(open_.job):  # else the row is on the disk as it is
            stats, summed = await evaluation(self._facts, self._models, open_, model, self._tell_failed)
            open_.row = replace(open_.row, stats=stats)
            await self._facts.keep(self._facts.db, self._facts.store.rounds.save_evaluation, open_.row)
        self._metrics.evaluated(stats)
        job, rule, sentence = open_.job, open_.job.best_by, f"{open_.title} is evaluated"
        if summed is not None and summed.total:
            known = summed.accuracy is not None
            sentence += f": accuracy {summed.accuracy:.4f}" if known else f": loss {summed.loss:.4f}"
        elif job.evaluates and not is_evaluated(stats["metrics"]):
            sentence = f"{open_.title} was not evaluated"
        if rule and not result_of(stats["metrics"], rule):
            sentence += f"; it has no {rule.split()[1]}, so best_by cannot choose its model"
        sentence += "".join(f"; {warning}" for warning in stats.get("warnings", ()))
        self._rounds.journal.tell(open_, "round_evaluated", sentence)

    def _tell_failed(self, open_: OpenRound, text: str) -> None:
        """Tell operators that the server has failed to evaluate a model."""
        self._rounds.journal.tell(open_, "evaluation_failed", text)

    async def damaged(self, error: DamagedModel) -> None:
        """End the rounds that start from a damaged model.

        Their jobs end, too.
        """
        hit = [each for each in self._rounds if each.base.version == error.version and each.phase in OPEN]
        for open_ in hit:
            self._note_damage(open_, error)
            await abandon(self._rounds, open_, error.reason)
        if not hit:
            log.error("%s", error.detail)

    async def forget(self, open_: OpenRound) -> None:
        """Erase the secrets of a round that is over."""
        await self._privacy.ended(open_)

    def end_training(self, open_: OpenRound) -> None:
        """Tell workers and clients that the round has closed."""
        self._rounds.groups.handle(open_, gr.GroupClosed(open_.row.reason))
        self._dispatch.ended(open_, self._rounds.latest)

    async def _go_on_without(self, open_: OpenRound, error: DamagedUpdates) -> None:
        """Forget damaged updates that were accepted.

        The round ends without them, or is abandoned for want of them.
        """
        rounds = self._rounds
        can_publish = await open_.kind.lost(frozenset(error.clients), error.reason)
        await self._facts.db(self._facts.drop_updates, open_.row.round, sorted(error.clients))
        for client, text in error.clients.items():
            del open_.accepted[client]
            rounds.handle(open_, Lost(client))
            text = f"{text}: what it had learned is lost"
            open_.failures.append(text)
            self._rounds.journal.note(open_, "blob_damaged", text, client, clients=True)
        round_ = open_.state.round
        few = round_ is not None and len(round_.delivered) < round_.rules.min_to_aggregate
        if few or not can_publish:
            rounds.handle(open_, Abandoned(error.reason))

    def _note_damage(self, open_: OpenRound, error: DamagedModel) -> None:
        open_.failures.insert(0, error.detail)
        open_.retryable = False
        self._rounds.journal.tell(open_, "blob_damaged", error.detail)


async def wait_for_disk(facts: Facts, open_: OpenRound) -> None:
    """Wait until the disk works, or the round's phase ends."""
    storage, phase = facts.storage, open_.phase
    while storage.fault and open_.phase is phase:
        open_.changed.clear()
        await storage.works_or(open_.changed)


async def publish(facts: Facts, models: Models, privacy: RoundPrivacy, open_: OpenRound) -> tuple[ModelRow, RoundRow]:
    """Make the next model, and commit it with its round's end.

    Args:
        facts: keeps the model.
        models: makes it.
        privacy: knows the spending of earlier rounds.
        open_: the round.

    Raises:
        DamagedModel, DamagedUpdates: if what it is made of is damaged.
        StorageFailed: if the disk refuses it; nothing was changed.
        StorageError, CodecError, OptimizerError, RuleError, SeamError, RuntimeError: if it cannot be made; the last is
            torch's.
    """
    async with facts.new_version() as version:
        closed = open_.closed(facts.store.secret, privacy.past_of(open_.row))
        open_.prepared = await facts.heavy(models.maker.prepare, closed)
        made = await facts.heavy(models.maker.next, open_.base, open_.prepared, version)
        ended = open_.ended(Phase.PUBLISHED, model_version=version)
        frozen = open_.command.job.frozen_digest
        model = replace(made, job_id=open_.row.job_id, metrics=ended.stats["metrics"], frozen_digest=frozen)
        try:
            commit, charge = facts.store.models.publish, open_.prepared.charge()
            await facts.db(facts.commit_model, model, commit, model, ended, charge)
        except StorageFailed:
            await facts.db(facts.discard, model.files)  # they take up the space that is missing
            raise
        return model, ended


async def evaluation(
    facts: Facts, models: Models, open_: OpenRound, model: ModelRow, tell: Callable[[OpenRound, str], None]
) -> tuple[dict[str, Any], EvaluationRow | None]:
    """Return the figures of an evaluation, and the clients' sum.

    Args:
        facts: keeps the clients' evaluations.
        models: evaluates on the server.
        open_: the round.
        model: that it has published.
        tell: is called with a sentence on each evaluation that has failed on the server.
    """
    stats, warnings = open_.stats(open_.row.stats["seconds"]), list[str]()
    if open_.job.aggregation.own:
        try:
            stats["metrics"] |= with_origin("server", await facts.heavy(models.maker.ask_metrics, model, open_.job))
        # The model is published already, so a fault of the user's code here costs only its figures.
        except (StrategyError, SeamError, StorageError, CodecError, MemoryError, RuntimeError) as error:
            log.warning("round %d has published, but: %s", open_.row.round, error, exc_info=error.__cause__)
            warnings.append(printable(str(error)) or "the server has too little memory to evaluate the model")
            tell(open_, warnings[-1])
    failed = [open_.unevaluated[client] for client in sorted(open_.unevaluated)]
    if open_.job.evaluate_on_server and open_.kind.evaluates:
        figures, why = await _on_server(facts, models, open_.job, model)
        stats["metrics"] |= figures.pop("metrics", {})
        stats |= figures
        if why:
            failed.append(printable(why))
            tell(open_, why)
    if failed:
        stats["unevaluated"] = failed[0]
    # A client that has sent nothing may just be away, so that is no failure of its evaluation.
    if warnings := warnings + _first(failed + _silent(open_)):
        stats["warnings"] = warnings
    stats["evaluate_seconds"] = time.monotonic() - open_.started - stats["seconds"]
    summed = await facts.keep(facts.db, facts.store.evaluations.total, model.version)
    if summed is not None:
        stats |= {name: getattr(summed, name) for name in ("correct", "total", "loss_sum", "classified")}
        stats["metrics"] |= with_origin("eval", summed.metrics, accuracy=summed.accuracy, loss=summed.loss)
    return stats, summed


async def _on_server(facts: Facts, models: Models, job: Job, model: ModelRow) -> tuple[dict[str, Any], str]:
    """Return the figures of the server's evaluation, and a sentence.

    The sentence says which figures are missing; empty = none is.
    """
    try:
        counts = await facts.heavy(models.maker.test_set.evaluate, model, job)
    except EvaluationFailed as error:
        return {}, f"the server could not evaluate model {model.version}: {error}"
    means = with_origin("server", counts.metrics, accuracy=counts.accuracy, loss=counts.loss)
    figures = {"server_accuracy": counts.accuracy, "server_loss": counts.loss, "metrics": means}
    lacks = " ".join(counts.warnings)
    return figures, f"the server has evaluated model {model.version}, but: {lacks}" if lacks else ""


def _is_evaluated_by_any(job: Job) -> bool:
    """Return whether anybody evaluates the models of a job."""
    return job.evaluates or bool(job.aggregation.own)


def _silent(open_: OpenRound) -> list[str]:
    """Return a sentence on each client without a report."""
    round_ = open_.state.round
    silent = sorted(round_.evaluators - round_.evaluated) if round_ is not None else []
    return [f"{client} has sent no evaluation in time" for client in silent]


def _first(sentences: list[str]) -> list[str]:
    """Return the first sentences, and the number of others."""
    more = len(sentences) - _MOST_SENTENCES
    return sentences[:_MOST_SENTENCES] + ([f"and {more} more evaluations are missing"] if more > 0 else [])
