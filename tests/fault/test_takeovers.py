"""Two servers that take over from each other count each accepted update once, however the leader ends.

Clients deliver known updates, and repeat those that no server has confirmed. Then every model is recomputed from the
accepted updates, and compared with that of a single server, of which nothing has disturbed the same job.
"""

import random
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests import postgres
from tests.campaign.checks import CUT_SHORT
from tests.conftest import REPEATED, SEED
from tests.fault.counted_job import NAMES, ROUNDS_EACH, SETTINGS, CountedJob
from tests.fault.counted_updates import FolderState, SharedState, State
from tests.fault.faulty_fleet import FaultyFleet
from tests.fault.killable_clients import KillableClients
from tests.fault.leader_ends import CRASH_POINTS, ENDS, TwoAddresses, die_at_each
from tests.fault.random_kills import LONGEST, wait
from tests.s3 import s3_server

FEW, MANY = len(ENDS), 25  # takeovers in `make test`, and in each repeat of `make soak`


def digests(state: State) -> list[tuple[object, ...]]:
    return state.ask("SELECT version, digest FROM models ORDER BY version")


def undisturbed(folder: Path, seed: int, rounds: int) -> list[tuple[object, ...]]:
    """Run the same job on a single server; return the digest of each model."""
    job = CountedJob(seed, rounds)
    folder.mkdir()
    with FaultyFleet(folder, SETTINGS) as fleet, KillableClients(fleet, job.update_log, NAMES) as clients:
        job.start(fleet)
        job.end(fleet, clients)
    state = FolderState(folder / "state" / "server")
    assert job.check(state) == len(NAMES) * rounds
    return digests(state)


@pytest.fixture
def database() -> str:
    return postgres.shared().new_database()


@pytest.mark.parametrize("repeat", REPEATED)
def test_each_accepted_update_counts_once_however_the_leader_ends(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    database: str,
    repeat: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seed, takeovers = SEED + repeat, MANY if repeat else FEW
    job, done = CountedJob(seed, ROUNDS_EACH * takeovers), Counter[str]()
    with ExitStack() as stack:
        objects = {}
        if repeat % 2:  # the others have their objects in a folder
            folder = tmp_path_factory.mktemp("s3")
            for name, value in stack.enter_context(s3_server(folder, "bucket")).items():
                monkeypatch.setenv(name, value)
            objects = {"blob_url": "s3://bucket/state"}
        fleet = stack.enter_context(TwoAddresses(tmp_path, database, settings=SETTINGS | objects))
        clients = stack.enter_context(KillableClients(fleet, job.update_log, NAMES))
        job.start(fleet)
        names = [*ENDS]
        for number in range(takeovers):
            rng = random.Random(f"{seed} {number}")
            if number % len(names) == 0:
                rng.shuffle(names)
            way = names[number % len(names)]
            clients.allow_rounds(ROUNDS_EACH * (number + 1))
            wait(rng.uniform(0, LONGEST))
            ENDS[way](fleet, clients, rng)
            done[way] += 1
        job.end(fleet, clients)
        logs = [CUT_SHORT.sub("", each.log.read_text()) for each in (fleet.server, fleet.standby)]
        assert [line for text in logs for line in text.splitlines() if "Traceback" in line] == []
        state = SharedState(database, str(fleet.server.settings["blob_url"]))
        counted = job.check(state)
        assert digests(state) == undisturbed(tmp_path / "undisturbed", seed, job.rounds)
    ways = ", ".join(f"{count} {way}" for way, count in sorted(done.items()))
    print(f"{ways}: {counted} updates in {job.rounds} rounds; {job.update_log.summary()}")


def test_the_other_server_leads_whatever_crash_point_the_leader_dies_at(tmp_path: Path, database: str) -> None:
    job = CountedJob(SEED, ROUNDS_EACH * len(CRASH_POINTS))
    with (
        TwoAddresses(tmp_path, database, settings=SETTINGS) as fleet,
        KillableClients(fleet, job.update_log, NAMES) as clients,
    ):
        job.start(fleet)
        clients.allow_rounds(job.rounds)
        seconds = die_at_each(fleet, clients, CRASH_POINTS)
        job.end(fleet, clients)
        job.check(SharedState(database, str(fleet.server.settings["blob_url"])))
    print({place: round(each, 2) for place, each in seconds.items()})
