"""The clocks of open rounds on disk, and old models."""

import asyncio
import time
from contextlib import suppress
from dataclasses import replace
from math import inf

from fedring.server.config import ServerConfig
from fedring.server.model.models import Models
from fedring.server.round import machine as rd
from fedring.server.round.events import Phase
from fedring.server.round.open_round import PERIOD
from fedring.server.running.rounds import Rounds
from fedring.server.state.facts import Facts
from fedring.server.state.failures import StorageError

_ALL = 1_000_000_000
_PRUNE_SECONDS = 1.0
"""Rounds may be shorter, and looking for what is old takes as long for one round as for ten."""


class Keeper:
    """Notes the time left of open rounds; deletes old models."""

    def __init__(self, rounds: Rounds, facts: Facts, models: Models, config: ServerConfig) -> None:
        self._rounds, self._facts, self._models, self._config = rounds, facts, models, config
        self._prune_at = 0.0  # monotonic seconds

    async def run(self) -> None:
        """Note the time left again and again, until cancelled.

        So a restart gives rounds no more time.
        """
        while True:
            await asyncio.sleep(PERIOD)
            await self.save_time(less=PERIOD)

    async def save_time(self, *, less: float = 0.0) -> None:
        """Note the seconds that the open rounds have left.

        `less` of them are as good as gone.
        """
        for open_ in self._rounds:
            round_ = open_.state.round
            if round_ is None or round_.phase not in (Phase.WAITING, Phase.TRAINING):
                continue
            # While it waits for its turn or for people, a restart must leave its clients the time to come back.
            now = open_.held_since or time.monotonic() + less
            left = max(0.0, rd.deadline(round_) - now)
            if left == inf:
                continue
            open_.row = replace(open_.row, seconds_left=left)
            with suppress(StorageError):  # the disk is full, or somebody else holds the database: the next note will do
                await self._facts.db(self._facts.store.rounds.save_seconds_left, open_.row.round, round_.phase, left)

    async def prune_now_and_then(self) -> None:
        """Do as `prune` does, unless that was done within the last second."""
        if time.monotonic() >= self._prune_at:
            await self.prune()

    async def prune(self) -> None:
        """Delete models, updates and rounds that are older than the configuration keeps.

        The models from which open rounds start stay.
        """
        facts, config = self._facts, self._config
        bases = {open_.base.version for open_ in self._rounds}
        keep = (config.keep_models, config.keep_update_rounds, config.keep_rounds, config.keep_jobs)
        await facts.db(facts.store.shorten_log)
        await facts.db(facts.blobs.forget_unnamed, config.unnamed_seconds)
        if await facts.db(facts.prune, *keep):
            kept = await facts.db(facts.store.models.newest, _ALL)
            self._models.versions.forget({row.version for row in kept} | bases)
        self._prune_at = time.monotonic() + _PRUNE_SECONDS
