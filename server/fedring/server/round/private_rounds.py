"""Differential privacy of rounds: budget, noise secret, and charges."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fedring.codec.schema import Schema
from fedring.privacy.account import NoAccountant, epsilon
from fedring.server.model.transforms.listing import transforms_of
from fedring.server.round.open_round import OpenRound
from fedring.server.state.facts import Facts
from fedring.server.state.noise_secret import erase_noise_secrets, noise_secret
from fedring.server.state.rows import RoundRow
from fedring.train.jobs.job import Job

T = TypeVar("T")


class RoundPrivacy:
    """The privacy budget and the noise of jobs with `dp`.

    For other jobs, its methods do nothing.

    Args:
        facts: hold the charges.
        folder: the state folder, which holds the secret of the noise.
        schema_of: returns the schema of a job's shared tensors.
    """

    def __init__(self, facts: Facts, folder: Path, schema_of: Callable[[Job], Schema]) -> None:
        self._facts, self._folder, self._schema_of = facts, folder, schema_of

    async def spent(self, job: Job) -> str:
        """Return why the job may not open another round.

        "" if it may.
        """
        privacy = job.dp
        if privacy is None or not privacy.max_epsilon:
            return ""
        rows = await self._facts.db(self._facts.store.rounds.charges)
        schema = await self._facts.heavy(self._schema_of, job)
        more = await self._facts.heavy(transforms_of(job).most_charged, job, schema.num_parameters)
        # The budget must hold after the next round, so its largest possible charge is added beforehand.
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

    def past_of(self, row: RoundRow) -> "RoundPast":
        """Return the rounds before one. Call it in the event loop."""
        return RoundPast(self._facts, row.job_id, partial(noise_secret, self._folder, self._name(row)))

    def why_not_resumed(self, open_: OpenRound) -> str:
        """Return why a round cannot go on after a restart.

        "" if it can.
        """
        epoch = self._facts.store.epoch
        if open_.job.dp is None or all(update.epoch == epoch for update in open_.accepted.values()):
            return ""
        return "the server was restored, and may have published its model before, with other noise"

    async def ended(self, open_: OpenRound, others: Iterable[OpenRound]) -> None:
        """Erase the noise secret of a round that is over.

        Those of the other open rounds stay.
        """
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


class RoundPast:
    """A job's earlier rounds, for a thread that makes a model.

    It must be made in the event loop, in which it reads the store.

    Args:
        facts: of the server.
        job_id: of the job.
        secret: returns the secret of the noise of the round in progress.
    """

    def __init__(self, facts: Facts, job_id: int, secret: Callable[[], bytes]) -> None:
        self._facts, self._job_id, self._secret = facts, job_id, secret
        self._loop = asyncio.get_running_loop()

    def last_stats(self) -> Mapping[str, Any]:
        """See `fedring.server.model.transforms.transform.Past`."""
        last = self._db(partial(self._facts.store.rounds.last_published, self._job_id))
        return last.stats if last else {}

    def last_clip(self) -> float:
        """See `fedring.server.model.transforms.transform.Past`."""
        charges = self._db(self._facts.store.rounds.charges)
        return next((charge.next_clip for charge in reversed(charges) if charge.job_id == self._job_id), 0.0)

    def noise_secret(self) -> bytes:
        """See `fedring.server.model.transforms.transform.Past`."""
        return self._secret()

    def _db(self, function: Callable[[], T]) -> T:
        return asyncio.run_coroutine_threadsafe(self._facts.db(function), self._loop).result()
