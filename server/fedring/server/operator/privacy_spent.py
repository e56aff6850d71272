"""The clients' spent privacy, kept ready for the page and for Prometheus."""

import asyncio
import logging

from prometheus_client import Gauge

from fedring.privacy.account import NoAccountant
from fedring.server.operator.privacy_report import privacy_message
from fedring.server.running.rounds import Rounds
from fedring.server.state.facts import Facts
from fedring.server.state.failures import FsyncFailed
from fedring.v1 import control_pb2 as pb

log = logging.getLogger(__name__)

_ALL = 1_000_000_000
_PERIOD = 1.0
"""Seconds between two looks at whether a round has published or ended."""


class PrivacySpent:
    """The report of `flctl privacy`, computed once per number of charged rounds.

    Args:
        facts: hold the charges.
        rounds: say when a round has published or ended.
        gauge: is set to epsilon.

    Attributes:
        now: the spent privacy; None if nothing is spent, or if the server lacks the package that computes epsilon.
    """

    def __init__(self, facts: Facts, rounds: Rounds, gauge: Gauge) -> None:
        self.now: pb.Privacy | None = None
        self._facts, self._rounds, self._gauge = facts, rounds, gauge
        self._charges = 0

    async def run(self) -> None:
        """Keep it up to date, until cancelled."""
        rounds = self._rounds
        await self._try()
        latest, last = rounds.latest, rounds.last
        while True:
            await asyncio.sleep(_PERIOD)
            if rounds.latest is not latest or rounds.last is not last:
                latest, last = rounds.latest, rounds.last
                await self._try()

    async def refresh(self) -> None:
        """Compute it again if there are other charges than before."""
        facts = self._facts
        charges = await facts.db(facts.store.rounds.charges)
        if len(charges) == self._charges:
            return
        jobs = await facts.db(facts.store.jobs.newest, _ALL)
        self._charges = len(charges)
        try:
            now = await facts.work(privacy_message, charges, jobs, 0.0)
        except NoAccountant:
            return  # another look would not find it, either
        self._gauge.set(now.epsilon)
        self.now = now

    async def _try(self) -> None:
        try:
            await self.refresh()
        except FsyncFailed:
            raise  # the server ends anyway, and says why
        except Exception:  # a figure for people must not end the rounds
            log.exception("what is spent of the clients' privacy cannot be computed")
