"""A database that restarts, and an object store that is away, in the middle of rounds: nothing accepted is lost."""

import signal
from pathlib import Path
from random import Random

import pytest

from fedring.daemon.exits import Exit
from tests import postgres
from tests.conftest import SEED
from tests.fault.counted_job import NAMES, ROUNDS_EACH, SETTINGS, CountedJob
from tests.fault.counted_updates import SharedState
from tests.fault.faulty_fleet import wait_for
from tests.fault.killable_clients import KillableClients
from tests.fault.leader_ends import ENDS, TwoAddresses
from tests.fault.random_kills import LONGEST, wait
from tests.s3 import S3Server


def test_a_database_that_restarts_in_mid_round_loses_nothing(tmp_path: Path) -> None:
    modes, rng = ("fast", "immediate"), Random(SEED)
    cluster, job = postgres.Cluster(postgres.folder_for_anybody()), CountedJob(SEED, ROUNDS_EACH * 2)
    try:
        with (
            TwoAddresses(tmp_path, cluster.new_database(), settings=SETTINGS) as fleet,
            KillableClients(fleet, job.update_log, NAMES) as clients,
        ):
            job.start(fleet)
            for number, mode in enumerate(modes):
                fleet.until_the_standby_waits()  # one that starts without a database ends
                clients.allow_rounds(ROUNDS_EACH * (number + 1))
                wait(rng.uniform(0, LONGEST))
                clients.server_is_up.clear()
                cluster.stop(mode)
                assert wait_for(fleet, "the end of the leader", fleet.server.wait) == Exit.TRY_AGAIN
                cluster.start()
                fleet.until_the_standby_leads()
                fleet.take_turns()
                clients.server_is_up.set()
            job.end(fleet, clients)
            job.check(SharedState(fleet.database, str(fleet.server.settings["blob_url"])))
    finally:
        cluster.stop()


@pytest.mark.parametrize("seconds", [2.0, pytest.param(60.0, marks=pytest.mark.soak)])
@pytest.mark.parametrize("how", ["ended", "frozen"])
def test_an_object_store_that_is_away_loses_nothing(
    tmp_path: Path, how: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / "s3").mkdir()
    store, database = S3Server(folder, "models"), postgres.shared().new_database()
    for name, value in store.env.items():
        monkeypatch.setenv(name, value)
    job, settings = CountedJob(SEED, 2 * ROUNDS_EACH), {**SETTINGS, "blob_url": "s3://models/run"}
    store.start()
    try:
        with (
            TwoAddresses(tmp_path, database, settings=settings) as fleet,
            KillableClients(fleet, job.update_log, NAMES) as clients,
        ):
            job.start(fleet)
            clients.allow_rounds(ROUNDS_EACH)
            if how == "ended":
                store.stop()
            else:
                store.send(signal.SIGSTOP)
            wait(seconds)
            if how == "ended":
                store.start()
            else:
                store.send(signal.SIGCONT)
            clients.allow_rounds(ROUNDS_EACH)
            assert fleet.leaders == 1, "a standby would have the same object store"
            ENDS["killed"](fleet, clients, Random(SEED))
            job.end(fleet, clients)
            job.check(SharedState(database, str(settings["blob_url"])))
    finally:
        store.stop()
