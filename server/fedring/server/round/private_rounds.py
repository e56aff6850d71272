"""Differential privacy of rounds: what may still be spent, the secret of the noise, and what was charged."""

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from fedring.codec.schema import Schema
from fedring.privacy.account import NoAccountant, epsilon
from fedring.server.model.private_mean import PrivateRound, most_charged, private_round, summed_round
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
        schema_of: returns what the jobs' models share.
    """

    def __init__(self, facts: Facts, folder: Path, schema_of: Callable[[Job], Schema]) -> None:
        self._facts, self._folder, self._schema_of = facts, folder, schema_of

    async def spent(self, job: Job) -> str:
        """Return why no further round of a job may start, or "" if one may."""
        privacy = job.dp
        if privacy is None or not privacy.max_epsilon:
            return ""
        rows = await self._facts.db(self._facts.store.charges)
        schema = await self._facts.heavy(self._schema_of, job)
        more = await self._facts.heavy(most_charged, job, schema.num_parameters)
        charges = [*(row.cost for row in rows), more]
        try:
            total = await self._facts.heavy(epsilon, charges, privacy.delta)
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
        if open_.job.dp.by_clients:
            return summed_round(open_.job.dp, len(open_.row.selected))
        store = self._facts.store
        secret = await self._facts.work(noise_secret, self._folder, self._name(open_.row))
        charges = await self._facts.db(store.charges)
        clips = (charge.next_clip for charge in reversed(charges) if charge.job_id == open_.row.job_id)
        clip = next(clips, open_.job.dp.clip)
        return private_round(open_.job.dp, updates, len(open_.row.selected), clip, secret, store.run_id)

    @staticmethod
    def charge_of(open_: OpenRound) -> ChargeRow | None:
        """Return what a round that is published costs; None if that was charged before, or costs nothing."""
        if open_.private is None or (open_.job.dp is not None and open_.job.dp.by_clients):
            return None
        done = open_.private
        return ChargeRow(open_.row.round, open_.row.job_id, done.noise_multiplier, done.next_clip, time.time())

    def why_not_resumed(self, open_: OpenRound) -> str:
        """Return why a round cannot go on after a restart, or "" if it can."""
        epoch = self._facts.store.epoch
        if open_.job.dp is None or all(update.epoch == epoch for update in open_.accepted.values()):
            return ""
        return "the server was restored, and may have published its model before, with other noise"

    async def ended(self, open_: OpenRound, others: Iterable[OpenRound]) -> None:
        """Erase the secret of a round that is over, and keep those of the other open rounds."""
        if open_.job.dp is not None:
            await self._facts.keep(self.forget, [each.row for each in others if each is not open_])

    async def forget(self, but: Iterable[RoundRow] = ()) -> None:
        """Erase the secrets of all rounds but some.

        Raises:
            StorageFailed: if that fails.
        """
        keep = [self._name(row) for row in but]
        await self._facts.work(lambda: erase_noise_secrets(self._folder, keep=keep))

    def _name(self, row: RoundRow) -> str:
        return f"{self._facts.store.epoch}-{row.round}"
