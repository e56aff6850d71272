"""A server that is killed again and again at random moments counts each accepted update once, and nothing else.

Clients deliver known updates, and repeat those that the server has not confirmed. Then every file and every row of the
state is checked, and every model is recomputed.
"""

import random
from pathlib import Path

import numpy as np
import pytest

from fedring.codec.digest import is_called, name_of
from tests.conftest import REPEATED, SEED
from tests.damage import ask
from tests.fault.faulty_fleet import FaultyFleet, wait_for
from tests.fault.killable_clients import SIZE, KillableClients
from tests.fault.random_kills import KEEP_ALL, LONGEST, wait
from tests.fault.update_log import UpdateLog
from tests.fleets import Control
from tests.system.wire import outcome, vector_job

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
            ended = wait_for(fleet, "the end of the job", lambda: outcome(control, job_id, control.follow_job(job_id)))
        clients.stop()
        fleet.restart_server()
        fleet.server.kill()
        state, log = fleet.directory / "state" / "server", fleet.server.log.read_text()
    assert (ended.state, ended.rounds_done, ended.reason) == ("completed", rounds, "")
    assert update_log.surprises == []
    assert "Traceback" not in log
    check_files(state)
    counted = check_updates(state, update_log)
    check_models(state, update_log, rounds)
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


def check_updates(state: Path, update_log: UpdateLog) -> int:
    """Assert that confirmed updates are in the database once, and refused ones are not; return how many there are."""
    rows = ask(state, "SELECT round, client_id, digest, num_samples, length(blob) FROM updates")
    accepted = {(number, client): digest for number, client, digest, _, _ in rows}
    assert len(accepted) == len(rows)
    assert {key: accepted.get(key) for key in update_log.confirmed} == update_log.confirmed
    assert [key for key in update_log.refused if accepted.get(key[:2]) == key[2]] == []
    for number, client, digest, samples, blob in rows:
        offered = update_log.offered[number, client, digest]
        assert (samples, bool(blob)) == (offered.samples, offered.large)
    return len(rows)


def check_models(state: Path, update_log: UpdateLog, rounds: int) -> None:
    """Assert that each round has published one model: the previous one plus the mean of its accepted updates."""
    ended = ask(state, "SELECT job_round, phase, base_version, model_version FROM rounds ORDER BY round")
    assert ended == [(number, "published", number, number + 1) for number in range(1, rounds + 1)]
    models = ask(state, "SELECT version, round, base_version, digest FROM models ORDER BY version")
    assert [version for version, *_ in models] == list(range(1, rounds + 2))
    before = np.zeros(SIZE, np.float32)
    assert published(state, 1).tobytes() == before.tobytes()
    for version, number, base, digest in models[1:]:
        assert base == int(str(version)) - 1
        after = published(state, int(str(version)))
        assert after.tobytes() == recomputed(state, update_log, int(str(number)), before).tobytes(), f"model {version}"
        assert name_of(after.tobytes()) == digest
        before = after


def published(state: Path, version: int) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
    """Return the parameters in the version's file, which are its last bytes."""
    ((blob,),) = ask(state, "SELECT blob FROM models WHERE version = ?", version)
    return np.frombuffer((state / "blobs" / str(blob)).read_bytes()[-4 * SIZE :], "<f4")


def recomputed(
    state: Path, update_log: UpdateLog, number: int, base: "np.ndarray[tuple[int], np.dtype[np.float32]]"
) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
    """Return base + sum of n_i d_i / sum of n_i, in float64 in the order of the clients' names, rounded once."""
    total, samples = np.zeros(SIZE, np.float64), 0
    for client, digest in ask(
        state, "SELECT client_id, digest FROM updates WHERE round = ? ORDER BY client_id", number
    ):
        offered = update_log.offered[number, str(client), str(digest)]
        total += offered.samples * offered.values.astype(np.float64)
        samples += offered.samples
    return (base + total / samples).astype(np.float32)
