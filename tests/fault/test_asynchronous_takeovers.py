"""Two servers that take over from each other count each update of an asynchronous job once, however the leader ends."""

import random
from pathlib import Path

import numpy as np
import pytest

from fedring.train.jobs.asynchronous_table import staleness_weight
from tests import postgres
from tests.campaign.checks import CUT_SHORT
from tests.conftest import REPEATED, SEED
from tests.fault.counted_job import NAMES, SETTINGS, CountedJob
from tests.fault.counted_updates import SharedState, State, check_updates, published
from tests.fault.killable_clients import SIZE, KillableClients
from tests.fault.leader_ends import ENDS, TwoAddresses, die_at_each
from tests.fault.random_kills import LONGEST, wait

EACH, BUFFER = 8, 2  # versions between two ends of a leader, and updates of each
CRASH_POINTS = {
    *("before_commands_commit", "after_commands_commit", "before_row_commit", "after_row_commit"),
    *("before_publish_commit", "after_publish_commit"),
}


class AsynchronousJob(CountedJob):
    """Such a job whose clients do not wait for each other."""

    def __init__(self, seed: int, rounds: int) -> None:
        super().__init__(seed, rounds)
        table = {"concurrency": len(NAMES), "buffer": BUFFER}
        self._spec |= {"asynchronous": table, "weights": "uniform", "evaluate": False}

    def check(self, state: State) -> int:
        """Assert that each confirmed update counts once, in one version; return how many there are."""
        assert self.update_log.surprises == [], self.update_log.surprises
        ended = state.ask("SELECT round, model_version FROM rounds WHERE model_version > 0 ORDER BY round")
        assert len(ended) == self.rounds
        before = np.zeros(SIZE, np.float32)
        for number, version in ended:
            query = "SELECT round, client_id, digest, staleness FROM updates WHERE buffer = ? ORDER BY client_id"
            rows = state.ask(query, number)
            assert len({client for _, client, _, _ in rows}) == len(rows) <= BUFFER
            total = np.zeros(SIZE, np.float64)
            for begun, client, digest, staleness in rows:
                values = self.update_log.offered[int(str(begun)), str(client), str(digest)].values
                total += staleness_weight(int(str(staleness))) * values.astype(np.float64)
            after = published(state, int(str(version)))
            assert after.tobytes() == (before + total / BUFFER).astype(np.float32).tobytes(), f"model {version}"
            before = after
        return check_updates(state, self.update_log)


@pytest.mark.parametrize("repeat", REPEATED)
def test_each_accepted_update_counts_once_in_one_version(tmp_path: Path, repeat: int) -> None:
    database, seed = postgres.shared().new_database(), SEED + repeat
    job = AsynchronousJob(seed, EACH * (len(ENDS) + 1))
    with (
        TwoAddresses(tmp_path, database, settings=SETTINGS) as fleet,
        KillableClients(fleet, job.update_log, NAMES) as clients,
    ):
        job.start(fleet)
        rng = random.Random(seed)
        for number, name in enumerate(rng.sample(sorted(ENDS), len(ENDS)), 1):
            clients.allow_rounds(EACH * number)
            wait(rng.uniform(0, LONGEST))
            ENDS[name](fleet, clients, rng)
        job.end(fleet, clients)
        logs = [CUT_SHORT.sub("", each.log.read_text()) for each in (fleet.server, fleet.standby)]
        assert [line for text in logs for line in text.splitlines() if "Traceback" in line] == []
        print(f"{job.check(SharedState(database, str(fleet.server.settings['blob_url'])))} updates")


def test_the_other_server_goes_on_whatever_crash_point_the_leader_dies_at(tmp_path: Path) -> None:
    database, places = postgres.shared().new_database(), sorted(CRASH_POINTS)
    job = AsynchronousJob(SEED, EACH * (len(places) + 2))
    with (
        TwoAddresses(tmp_path, database, settings=SETTINGS) as fleet,
        KillableClients(fleet, job.update_log, NAMES) as clients,
    ):
        job.start(fleet)
        clients.allow_rounds(job.rounds)
        die_at_each(fleet, clients, places)
        job.end(fleet, clients)
        job.check(SharedState(database, str(fleet.server.settings["blob_url"])))
