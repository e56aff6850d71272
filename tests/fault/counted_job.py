"""A job that counts known updates of clients which repeat what no server has confirmed."""

from typing import Any

from tests.fault.counted_updates import State, check_models, check_updates
from tests.fault.faulty_fleet import FaultyFleet, job_end
from tests.fault.killable_clients import SIZE, KillableClients
from tests.fault.random_kills import KEEP_ALL
from tests.fault.update_log import UpdateLog
from tests.fleets import Control
from tests.system.wire import vector_job

NAMES = ("a", "b", "c", "d")
ROUNDS_EACH = 5  # rounds that clients may train before the next fault, so that each fault disturbs a round
SETTINGS = {**KEEP_ALL, "lost_after_seconds": 60.0}
"""Of its servers: nobody is lost who waits for a leader that stands still."""


class CountedJob:
    """A job of all clients that counts known updates.

    Args:
        seed: Decides the updates.
        rounds: How many there are.
    """

    def __init__(self, seed: int, rounds: int) -> None:
        self.update_log, self.rounds = UpdateLog(seed), rounds
        self._spec: dict[str, Any] = vector_job(
            rounds=rounds, min_clients=len(NAMES), model_args={"size": SIZE}, deadline_seconds=480
        )
        self._id = 0

    def start(self, fleet: FaultyFleet) -> None:
        with Control(fleet.control) as control:
            self._id = control.start_job(self._spec).job_id

    def end(self, fleet: FaultyFleet, clients: KillableClients) -> None:
        """Wait for its end, and stop the clients."""
        clients.allow_rounds(self.rounds)
        with Control(fleet.control) as control:
            job_end(fleet, control, self._id)
            job = control.job(self._id)
        clients.stop()
        assert (job.state, job.rounds_done, job.reason) == ("completed", self.rounds, "")

    def check(self, state: State) -> int:
        """Assert that each confirmed update counts once; return how many there are."""
        assert self.update_log.surprises == [], self.update_log.surprises
        check_models(state, self.update_log, self.rounds)
        return check_updates(state, self.update_log)
