"""Differential privacy of rounds: budget, noise secret, and charges."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from fedring.codec.schema import Schema
from fedring.privacy.account import NoAccountant, epsilon
from fedring.privacy.charges import Charge
from fedring.server.model.transforms.listing import transforms_of
from fedring.server.round.open_round import OpenRound
from fedring.server.state.facts import Facts
from fedring.server.state.noise_secret import (
    erase_noise_secret,
    erase_noise_secrets,
    has_noise_secret,
    noise_secret,
)
from fedring.server.state.rows import ChargeRow, RoundRow, UpdateRow
from fedring.train.jobs.job import Job

T = TypeVar("T")


class _Reserved(NamedTuple):
    """The most that a job's next round may cost."""

    most: Charge
    charged_before: int  # rounds of the job; one more means that the charge is known now


class RoundPrivacy:
    """The privacy budget and the noise of jobs that have a budget.

    For other jobs, its methods do nothing.

    Args:
        facts: hold the charges.
        folder: the state folder, which holds the secret of the noise.
        schema_of: returns the schema of a job's shared tensors.
        shared: whether other servers may have begun the rounds that are open at the start.
    """

    def __init__(self, facts: Facts, folder: Path, schema_of: Callable[[Job], Schema], *, shared: bool = False) -> None:
        self._facts, self._folder, self._schema_of, self._shared = facts, folder, schema_of, shared
        self._reserved: dict[int, _Reserved] = {}  # by job: what its next or open round costs at most
        self._one_at_a_time = asyncio.Lock()

    async def spent(self, job_id: int, job: Job, all_resumed: asyncio.Event) -> str:
        """Return why the job may not open another round.

        "" if it may: then the cost of that round is reserved until it has ended, and other jobs cannot spend it.

        Args:
            job_id: of the job.
            job: the job.
            all_resumed: is set once the cost of the rounds that a restart has interrupted is reserved.
        """
        budget = job.budget
        if budget is None:
            return ""
        await all_resumed.wait()
        most = await self._most_charged(job)
        async with self._one_at_a_time:  # so that two jobs do not find room for one round both
            rows = await self._reserve(job_id, most)
            if not budget.max_epsilon:
                return ""
            # The budget must hold after the next round, and after those that other jobs have open, so their largest
            # possible charges are added beforehand.
            counts = Counter(row.job_id for row in rows)
            pending = [each.most for job, each in self._reserved.items() if counts[job] == each.charged_before]
            try:
                total = await self._facts.heavy(epsilon, [*(row.cost for row in rows), *pending], budget.delta)
            except NoAccountant as error:
                self.release(job_id)
                return f"dp.max_epsilon cannot be kept: {error}"
            if total <= budget.max_epsilon:
                return ""
            self.release(job_id)
        others = "" if len(pending) == 1 else ", with the rounds that other jobs have open"
        return (
            f"one more round would take epsilon to {total:.3g} for delta = {budget.delta:g}{others}, above "
            f"dp.max_epsilon = {budget.max_epsilon:g}"
        )

    async def resumed(self, row: RoundRow, job: Job) -> None:
        """Reserve the cost of a round that a restart has interrupted."""
        if job.budget is not None:
            rows = await self._reserve(row.job_id, await self._most_charged(job))
            if any(each.round == row.round for each in rows):  # it has let a sum be seen, and was charged
                self.release(row.job_id)

    def release(self, job_id: int) -> None:
        """Reserve nothing for a job any more."""
        self._reserved.pop(job_id, None)

    async def _most_charged(self, job: Job) -> Charge:
        schema = await self._facts.heavy(self._schema_of, job)
        return await self._facts.heavy(transforms_of(job).most_charged, job, schema.num_parameters)

    async def _reserve(self, job_id: int, most: Charge) -> list[ChargeRow]:
        rows = await self._facts.db(self._facts.store.rounds.charges)
        self._reserved[job_id] = _Reserved(most, sum(row.job_id == job_id for row in rows))
        return rows

    def past_of(self, row: RoundRow) -> "RoundPast":
        """Return the rounds before one. Call it in the event loop."""
        return RoundPast(self._facts, row.job_id, partial(noise_secret, self._folder, self._name(row)))

    def why_not_resumed(self, open_: OpenRound) -> str:
        """Return why a round cannot go on after a restart.

        "" if it can.
        """
        epoch, budget = self._facts.store.epoch, open_.job.budget
        if budget is None:
            return ""
        if self._shared and budget.server_noise and not has_noise_secret(self._folder, self._name(open_.row)):
            # Two sums of the same updates with different noise would tell more than one: see docs/availability.md.
            return "another server may have drawn its noise"
        if all(update.epoch == epoch for update in open_.accepted.values()):
            return ""
        return "the server was restored, and may have published its model before, with other noise"

    async def ended(self, open_: OpenRound) -> None:
        """Erase the noise secret of a round that is over."""
        self.release(open_.row.job_id)
        if open_.job.budget is not None:
            await self._facts.keep(self._facts.work, erase_noise_secret, self._folder, self._name(open_.row))

    async def forget(self, but: Iterable[RoundRow] = ()) -> None:
        """Erase the secrets of all rounds but some, while none is open.

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

    def uncounted(self) -> Sequence[UpdateRow]:
        """See `fedring.server.model.transforms.transform.Past`."""
        return self._db(partial(self._facts.store.updates.uncounted, self._job_id))

    def noise_secret(self) -> bytes:
        """See `fedring.server.model.transforms.transform.Past`."""
        return self._secret()

    def _db(self, function: Callable[[], T]) -> T:
        return asyncio.run_coroutine_threadsafe(self._facts.db(function), self._loop).result()
