"""How fl-server is, in one message."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from fedring.server.jobs.queue import Jobs
from fedring.server.operator.listings import MOST_ROWS
from fedring.server.operator.report import job_message, lead_message
from fedring.server.round.report import open_message, round_message
from fedring.server.running.rounds import Rounds
from fedring.server.sessions.sessions import Sessions
from fedring.server.state.facts import Facts
from fedring.v1 import control_pb2 as pb
from fedring.version import VERSION


class StatusReport:
    """Makes the message of the server's status.

    Args:
        rounds: that are open.
        jobs: that run or wait.
        sessions: of the clients.
        facts: of the server.
        refused: returns the calls that the ports have refused, by reason.
        not_serving: returns why clients are not served now; empty if they are.
    """

    def __init__(
        self,
        rounds: Rounds,
        jobs: Jobs,
        sessions: Sessions,
        facts: Facts,
        refused: Callable[[], Mapping[str, int]],
        not_serving: Callable[[], str],
    ) -> None:
        self._rounds, self._jobs, self._sessions = rounds, jobs, sessions
        self._facts, self._store, self._refused = facts, facts.store, refused
        self._not_serving = not_serving
        self._began = time.monotonic()

    async def message(self) -> pb.Status:
        """Return how things are now."""
        jobs = await self._facts.db(self._store.jobs.newest, MOST_ROWS)
        latest, round_ = self._rounds.latest, open_message(self._rounds.newest)
        if round_ is None:
            newest = await self._facts.db(self._store.rounds.newest, 1)
            round_ = round_message(newest[0]) if newest else None
        # Read again, since the rows in the queue have the counts of the time when the jobs began.
        rows = [await self._facts.db(self._store.jobs.get, job_id) for job_id in list(self._jobs.running)]
        running = [job_message(replace(row, state="running")) for row in rows if row is not None]
        return pb.Status(
            run_id=self._store.run_id,
            version=VERSION,
            uptime_seconds=time.monotonic() - self._began,
            clients_watching=sum(session.matched for session in self._sessions),
            model_version=latest.version if latest else 0,
            job=max(running, key=lambda job: job.job_id, default=None),
            round=round_,
            jobs_queued=sum(row.state == "queued" for row in jobs),
            refused=self._refused(),
            not_serving=self._not_serving(),
            running=running,
            rounds=[message for each in self._rounds if (message := open_message(each, clients=False))],
            max_running_jobs=self._jobs.most,
            leadership=lead_message(self._facts.lead),
        )
