"""Differential privacy of rounds: what may still be spent, the secret of the noise, and what was charged."""

import time
from collections.abc import Sequence
from pathlib import Path

from fedring.privacy.account import NoAccountant, epsilon
from fedring.server.model.private_mean import PrivateRound, private_round
from fedring.server.round.open_round import OpenRound
from fedring.server.state.facts import Facts
from fedring.server.state.noise_secret import erase_noise_secrets, noise_secret
from fedring.server.state.rows import ChargeRow, RoundRow, UpdateRow
from fedring.train.job import Job


class RoundPrivacy:
    """What the rounds of jobs with `dp` need; for other jobs, its methods do nothing.

    Args:
        facts: hold the charges.
        folder: the state folder, which holds the secret of the noise.
    """

    def __init__(self, facts: Facts, folder: Path) -> None:
        self._facts, self._folder = facts, folder

    async def spent(self, job: Job) -> str:
        """Return why no further round of a job may start, or "" if one may."""
        privacy = job.dp
        if privacy is None or not privacy.max_epsilon:
            return ""
        charges = await self._facts.db(self._facts.store.charges)
        multipliers = [*(charge.noise_multiplier for charge in charges), privacy.noise_multiplier]
        try:
            total = await self._facts.heavy(epsilon, multipliers, privacy.delta)
        except NoAccountant as error:
            return f"dp.max_epsilon cannot be kept: {error}"
        if total <= privacy.max_epsilon:
            return ""
        return (
            f"one more round would take epsilon to {total:.3g} for delta = {privacy.delta:g}, above "
            f"dp.max_epsilon = {privacy.max_epsilon:g}"
        )

    async def prepare(self, open_: OpenRound, updates: Sequence[UpdateRow]) -> PrivateRound | None:
        """Return what is done to a round that is aggregated; None if its job has no differential privacy.

        Raises:
            StorageFailed: if the secret of its noise cannot be kept.
        """
        if open_.job.dp is None:
            return None
        store = self._facts.store
        secret = await self._facts.work(noise_secret, self._folder, self._name(open_.row))
        charges = await self._facts.db(store.charges)
        clips = (charge.next_clip for charge in reversed(charges) if charge.job_id == open_.row.job_id)
        clip = next(clips, open_.job.dp.clip)
        return private_round(open_.job.dp, updates, len(open_.row.selected), clip, secret, store.run_id)

    @staticmethod
    def charge_of(open_: OpenRound) -> ChargeRow | None:
        """Return what a round that is published costs; None if its job has no differential privacy."""
        if open_.private is None:
            return None
        done = open_.private
        return ChargeRow(open_.row.round, open_.row.job_id, done.noise_multiplier, done.next_clip, time.time())

    async def forget(self, but: RoundRow | None = None) -> None:
        """Erase the secrets of all rounds but one.

        Raises:
            StorageFailed: if that fails.
        """
        keep = [self._name(but)] if but is not None else []
        await self._facts.work(lambda: erase_noise_secrets(self._folder, keep=keep))

    def _name(self, row: RoundRow) -> str:
        return f"{self._facts.store.epoch}-{row.round}"
