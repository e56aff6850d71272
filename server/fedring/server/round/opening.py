"""Opening the rounds of a job, and resuming the one that a restart interrupted."""

import time
from dataclasses import replace

from fedring.server.config import ServerConfig
from fedring.server.model.models import Models
from fedring.server.model.testset import TestSet
from fedring.server.round import machine as rd
from fedring.server.round.events import Opened, Phase, Resumed, Round
from fedring.server.round.open_round import OpenRound
from fedring.server.round.plan import round_command, rules_of
from fedring.server.round.rounds import Rounds
from fedring.server.round.sessions import Sessions
from fedring.server.round.starting import base_of, begin
from fedring.server.state.facts import Facts
from fedring.server.state.failures import StorageError
from fedring.server.state.rows import JobRow, ModelRow, RoundRow
from fedring.train.job import Job
from fedring.v1 import federation_pb2 as pb

RECOVERY_SECONDS = 30.0
"""Seconds that clients have to come back after a restart of the server, if the round's deadline is not sooner."""


class RoundOpener:
    """Opens a round, or resumes one; whoever runs rounds takes it from there."""

    def __init__(
        self,
        rounds: Rounds,
        facts: Facts,
        models: Models,
        sessions: Sessions,
        test_set: TestSet,
        config: ServerConfig,
    ) -> None:
        self._rounds, self._facts, self._models = rounds, facts, models
        self._sessions, self._test_set, self._config = sessions, test_set, config
        self._frozen_digest = ""  # of the job that runs

    async def begin(self, job: JobRow, spec: Job) -> str:
        """Decide what a job starts from, and make it available. Returns a clause that says what it is.

        Raises:
            StorageFailed: if the disk refuses it; nothing was changed.
            StorageError, SeamError: if the job cannot start from there.
        """
        base, text = await begin(self._facts, self._models, job, spec)
        self._frozen_digest = await self._facts.heavy(self._models.maker.frozen_digest, spec, base)
        if self._rounds.latest is None or base.version > self._rounds.latest.version:  # it was just made
            self._rounds.latest = base
        return text

    async def open(self, job: JobRow, spec: Job, job_round: int) -> None:
        """Open the next round of a job.

        Raises:
            StorageFailed: if the disk refuses it; nothing was changed.
            StorageError, SeamError, DataError: if the round has no model to start from, or no samples to evaluate on.
        """
        facts = self._facts
        base = await base_of(facts, self._models, job)
        after = await self._residual_after(job.job_id)
        if spec.evaluate_on_server:
            await facts.heavy(self._test_set.load, spec)
        small = self._models.downloads.small(base, spec)  # before there is a row: it may fail, and be tried again
        wanted = RoundRow(0, job.job_id, job_round, Phase.WAITING, time.time(), base_version=base.version)
        row = await facts.db(facts.store.create_round, wanted)
        self._begin(row, spec, base, small, residual_after=after)
        self._rounds.handle(Opened(row.round, rules_of(spec, grace=self._config.lost_after_seconds)))

    async def resume(self, row: RoundRow, spec: Job) -> None:
        """Go on with the round that a restart interrupted; its clients have time to come back.

        Raises:
            StorageError: "missing_model" if the model that it starts from is gone.
        """
        rounds, facts = self._rounds, self._facts
        base = await facts.db(facts.store.model, row.base_version)
        if base is None:
            raise StorageError("missing_model", f"round {row.round} starts from model {row.base_version}, now gone")
        self._models.versions.remember(base)
        after = await self._residual_after(row.job_id)
        small = self._models.downloads.small(base, spec)
        rules = rules_of(spec, grace=self._config.lost_after_seconds)
        seconds = rd.seconds(rules, Phase(row.phase))
        elapsed = 0.0 if row.seconds_left is None else max(0.0, seconds - row.seconds_left)
        if row.phase == Phase.WAITING:
            self._begin(row, spec, base, small, residual_after=after)
            rounds.handle(Opened(row.round, rules, elapsed))
            return
        updates = await facts.db(facts.store.updates_of, row.round)
        resumed_row = replace(row, phase=Phase.TRAINING)
        open_ = self._begin(resumed_row, spec, base, small, residual_after=after)
        open_.accepted = {update.client_id: update for update in updates}
        open_.started = time.monotonic() - elapsed
        if spec.dp is not None and any(update.epoch != facts.store.epoch for update in updates):
            open_.stop_reason = "restored"  # its model may be published already, with other noise
        selected, delivered = frozenset(row.selected), frozenset(open_.accepted)
        # An aggregation that the restart cut off is simply due again.
        # When updates came is not kept: they came no later than now.
        seconds_each = (elapsed,) * len(delivered)
        resumed = Round(row.round, rules, Phase.TRAINING, 0.0, selected, delivered, seconds_each)
        rounds.handle(Resumed(resumed, RECOVERY_SECONDS, elapsed))
        rounds.gather(resumed=True)
        for session in self._sessions:
            if session.matched:
                rounds.matched(session.client_id)

    def _begin(
        self, row: RoundRow, spec: Job, base: ModelRow, small: pb.SmallModel | None, *, residual_after: tuple[int, int]
    ) -> OpenRound:
        most, store = self._config.max_update_bytes, self._facts.store
        command = round_command(spec, row, base, run_id=store.run_id, epoch=store.epoch, most_bytes=most)
        command.residual_after_epoch, command.residual_after = residual_after
        command.job.frozen_digest = self._frozen_digest
        open_ = OpenRound(row, spec, command, base, small)
        self._rounds.begin(open_)
        return open_

    async def _residual_after(self, job_id: int) -> tuple[int, int]:
        job = await self._facts.db(self._facts.store.job, job_id)
        return (job.residual_epoch, job.residual_after) if job else (0, 0)
