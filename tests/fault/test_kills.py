"""A server that is killed again and again at random moments counts each accepted update once, and nothing else.

Clients deliver known updates, and repeat those that the server has not confirmed. Then every file and every row of the
state is checked, and every model is recomputed.
"""

import random
from pathlib import Path

import pytest

from fedring.codec.digest import is_called
from tests.conftest import REPEATED, SEED
from tests.damage import ask
from tests.fault.counted_updates import FolderState, check_models, check_updates
from tests.fault.faulty_fleet import FaultyFleet, job_end
from tests.fault.killable_clients import SIZE, KillableClients
from tests.fault.random_kills import KEEP_ALL, LONGEST, wait
from tests.fault.update_log import UpdateLog
from tests.fleets import Control
from tests.system.wire import vector_job

FEW, MANY = 6, 16  # kills in `make test`, and in each repeat of `make soak`
ROUNDS_EACH = 5  # rounds that clients may train before the next kill, so that each kill disturbs a round
NAMES = ("a", "b", "c", "d")


@pytest.mark.parametrize("repeat", REPEATED)
def test_each_accepted_update_counts_once_however_often_the_server_is_killed(tmp_path: Path, repeat: int) -> None:
    seed, kills = SEED + repeat, MANY if repeat else FEW
    rounds = ROUNDS_EACH * kills
    update_log = UpdateLog(seed)
    with FaultyFleet(tmp_path, KEEP_ALL) as fleet, KillableClients(fleet, update_log, NAMES) as clients:
        with Control(fleet.control) as control:
            job = vector_job(rounds=rounds, min_clients=3, model_args={"size": SIZE}, deadline_seconds=240)
            job_id = control.start_job(job).job_id
        for number in range(kills):
            clients.allow_rounds(ROUNDS_EACH * (number + 1))
            disturb(fleet, clients, random.Random(f"{seed} {number}"))
        clients.allow_rounds(rounds)
        with Control(fleet.control) as control:
            job_end(fleet, control, job_id)
            ended = control.job(job_id)
        clients.stop()
        fleet.restart_server()
        fleet.server.kill()
        state, log = fleet.directory / "state" / "server", fleet.server.log.read_text()
    assert (ended.state, ended.rounds_done, ended.reason) == ("completed", rounds, "")
    assert update_log.surprises == []
    assert "Traceback" not in log
    check_files(state)
    counted = check_updates(FolderState(state), update_log)
    check_models(FolderState(state), update_log, rounds)
    print(f"{kills} kills, {counted} updates in {rounds} rounds; {update_log.summary()}")


def disturb(fleet: FaultyFleet, clients: KillableClients, rng: random.Random) -> None:
    """Kill the server at a random moment; sometimes kill a client before, or the server again while it starts."""
    wait(rng.uniform(0, LONGEST))
    if rng.random() < 0.5:
        clients.kill(rng.choice(NAMES), spool=rng.random() < 0.5)
        wait(rng.uniform(0, 0.02))
    clients.server_is_up.clear()
    fleet.server.kill()
    if rng.random() < 0.2:
        fleet.server.start()
        wait(rng.uniform(0, LONGEST))
        fleet.server.kill()
    fleet.start_server()
    clients.server_is_up.set()


def check_files(state: Path) -> None:
    """Assert that the database is undamaged, that each blob has the digest in its name, and that a row names it."""
    assert ask(state, "PRAGMA integrity_check") == [("ok",)]
    named = {name for (name,) in ask(state, "SELECT blob FROM updates UNION SELECT blob FROM models") if name}
    files = {path.name: path for path in (state / "blobs").iterdir() if path.name != "state_id"}
    assert files.keys() == named
    for name, path in files.items():
        assert is_called(path.read_bytes(), name)
    # The server may be killed while it tests the disk with a file; the next start deletes that file.
    assert {path.name for path in (state / "partial").iterdir()} <= {"probe"}
