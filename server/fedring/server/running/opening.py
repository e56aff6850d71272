"""Rounds of jobs, opened or resumed after a restart."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fedring.server.aggregation.strategy import HISTORY, StrategyError, past_round, with_settings
from fedring.server.config import ServerConfig
from fedring.server.model.models import Models
from fedring.server.round import machine as rd
from fedring.server.round.dispatch import Dispatch
from fedring.server.round.events import Abandoned, Phase, Resumed, Round, RoundOpened, RoundRules
from fedring.server.round.open_round import PERIOD, CannotResume, KindMaker, OpenRound
from fedring.server.round.plan import round_command, rules_of
from fedring.server.running.private_rounds import RoundPrivacy
from fedring.server.running.rounds import Rounds
from fedring.server.sessions.sessions import Sessions
from fedring.server.state.facts import Facts
from fedring.server.state.failures import StorageError
from fedring.server.state.rows import JobRow, ModelRow, RoundRow
from fedring.train.errors import SeamError
from fedring.train.jobs.job import Job
from fedring.v1 import federation_pb2 as pb

log = logging.getLogger(__name__)

_Failure = StrategyError | SeamError

RECOVERY_SECONDS = 30.0
"""Seconds that clients have to come back after a restart of the server, if the round's deadline is not sooner."""


@dataclass(frozen=True, slots=True)
class RunningJob:
    """A job that runs."""

    row: JobRow  # as noted when it began
    spec: Job  # with its seed
    frozen_digest: str


class RoundOpener:
    """Opens rounds, and resumes interrupted ones."""

    def __init__(
        self,
        rounds: Rounds,
        kinds: Sequence[KindMaker],
        facts: Facts,
        models: Models,
        privacy: RoundPrivacy,
        sessions: Sessions,
        config: ServerConfig,
    ) -> None:
        self._rounds, self._kinds, self._facts, self._models = rounds, kinds, facts, models
        self._privacy, self._sessions, self._config = privacy, sessions, config
        self._dispatch = Dispatch(sessions)

    async def refuses(self, job: RunningJob) -> str:
        """Return why the job may not open another round.

        "" if it may.
        """
        return await self._privacy.spent(job.row.job_id, job.spec, self._rounds.interrupted.all_resumed)

    def close(self, job_id: int) -> None:
        """Note that a job opens no more rounds.

        One may have failed after its cost was reserved.
        """
        self._privacy.release(job_id)

    async def open(self, job: RunningJob, job_round: int, base: ModelRow) -> OpenRound:
        """Open the next round of a job, from the model `base`.

        Raises:
            StorageFailed: if the disk refuses it; nothing was changed.
            SeamError: if the job's own code fails.
        """
        facts, spec = self._facts, job.spec
        # Before there is a row: it may fail, and be tried again.
        small = await facts.work(self._models.downloads.small, base, spec)
        settings, failure = await self._settings(job)
        wanted = RoundRow(0, job.row.job_id, job_round, Phase.WAITING, time.time(), base.version, settings=settings)
        row = await facts.db(facts.store.rounds.create, wanted)
        # There is a row now: another attempt from the start would leave it behind, and a restart would go on with it.
        return await facts.keep(self._wait_for_clients, row, job, base, small, failure=failure)

    async def resume(self, row: RoundRow, job: RunningJob) -> OpenRound:
        """Go on with a round that a restart interrupted.

        Its clients have time to come back.

        Raises:
            StorageError: "missing_model" if the model that it starts from is gone.
        """
        rounds, facts, spec = self._rounds, self._facts, job.spec
        await self._privacy.resumed(row, spec)
        base = await facts.db(facts.store.models.get, row.base_version)
        if base is None:
            raise StorageError("missing_model", f"round {row.round} starts from model {row.base_version}, now gone")
        await facts.work(self._models.versions.remember, base)
        small = await facts.work(self._models.downloads.small, base, spec)
        rules = rules_of(spec, grace=self._config.lost_after_seconds)
        seconds = rd.seconds(rules, Phase(row.phase))
        elapsed = 0.0 if row.seconds_left is None else max(0.0, seconds - row.seconds_left)
        if row.phase == Phase.WAITING:
            failure = None
            if row.settings is None:  # nobody was told of the round yet
                settings, failure = await self._settings(job)
                row = replace(row, settings=settings)
                await facts.db(facts.store.rounds.replace, row)
            return await self._wait_for_clients(row, job, base, small, failure=failure, elapsed=elapsed)
        updates = await facts.db(facts.store.updates.of_round, row.round)
        open_ = await self._begin(replace(row, phase=Phase.TRAINING), job, base, small)
        open_.accepted = {update.client_id: update for update in updates}
        open_.started = time.monotonic() - elapsed
        steps, refused = None, None
        try:
            steps = await open_.kind.restore()
        except CannotResume as error:
            refused = error
        selected, delivered = frozenset(row.selected), frozenset(open_.accepted)
        # An aggregation that the restart cut off is simply due again.
        # When updates came is not kept: they came no later than now, or before the first note of the time.
        seconds_each = (max(elapsed, PERIOD),) * len(delivered)
        rules = self._rules(open_)
        resumed = Round(row.round, rules, Phase.TRAINING, 0.0, selected, delivered, seconds_each, steps=steps)
        rounds.begin(open_, Resumed(resumed, RECOVERY_SECONDS, elapsed))
        if why := self._privacy.why_not_resumed(open_):
            refused = CannotResume("restored", why)
        if refused is not None:
            open_.failures.append(str(refused))
            rounds.handle(open_, Abandoned(refused.reason))
            return open_
        open_.kind.resumed()
        rounds.groups.gather(open_, resumed=True)
        for session in self._sessions:
            if session.matched:
                self._dispatch.remind(open_, rounds.latest, session.client_id)
        return open_

    async def _settings(self, job: RunningJob) -> tuple[dict[str, float] | None, _Failure | None]:
        """Ask the job's own strategy for the next round's settings.

        Returns None, and the reason, if it gives none.
        """
        if not job.spec.aggregation.own:
            return {}, None
        rows = await self._facts.db(self._facts.store.rounds.newest, HISTORY + 1, job.row.job_id)
        history = [row for row in reversed(rows) if row.ended_at is not None][-HISTORY:]
        try:
            return await self._facts.heavy(self._models.maker.ask_settings, job.spec, map(past_round, history)), None
        except (StrategyError, SeamError) as error:
            return None, error

    async def _wait_for_clients(
        self,
        row: RoundRow,
        job: RunningJob,
        base: ModelRow,
        small: pb.SmallModel | None,
        *,
        failure: _Failure | None,
        elapsed: float = 0.0,
    ) -> OpenRound:
        """Open the barrier, or abandon the round if its strategy has failed."""
        open_ = await self._begin(row, job, base, small)
        self._rounds.begin(open_, RoundOpened(row.round, self._rules(open_), elapsed))
        if failure is not None:
            log.error("round %d has no settings: %s", row.round, failure, exc_info=failure.__cause__)
            open_.failures.insert(0, str(failure))
            self._rounds.handle(open_, Abandoned(failure.reason))
        return open_

    async def _begin(self, row: RoundRow, job: RunningJob, base: ModelRow, small: pb.SmallModel | None) -> OpenRound:
        most, store = self._config.max_update_bytes, self._facts.store
        configured = with_settings(job.spec, row.settings or {})
        command = round_command(configured, row, base, run_id=store.run_id, epoch=store.epoch, most_bytes=most)
        command.residual_after_epoch, command.residual_after = job.row.residual_epoch, job.row.residual_after
        command.job.frozen_digest = job.frozen_digest
        if job.row.signed:
            command.job.signed.ParseFromString(job.row.signed)
        await self._facts.heavy(self._models.maker.command, configured, command, base)
        open_ = OpenRound(row, configured, command, base, small)
        found = (kind for each in self._kinds if (kind := each.kind_of(open_)) is not None)
        open_.kind = next(found, open_.kind)
        await open_.kind.prepare()
        return open_

    def _rules(self, open_: OpenRound) -> RoundRules:
        rules = rules_of(open_.job, grace=self._config.lost_after_seconds)
        return open_.kind.rules(replace(rules, left_out=open_.left_out, job_id=open_.row.job_id))
