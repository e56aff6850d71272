"""A server that is killed again and again at random moments counts what it has accepted, once, and nothing else.

Clients deliver updates that the test knows, and ask again for whatever they were not told of. Then the state is read
file by file and row by row, and every model is computed anew.
"""

import os
import random
import threading
from pathlib import Path

import numpy as np
import pytest

from fedring.codec.digest import is_called, name_of
from tests.conftest import REPEATED
from tests.damage import ask
from tests.fault.ledger import Ledger
from tests.fault.patience import FaultyFleet, patiently
from tests.fault.strangers import SIZE, Strangers
from tests.fleets import Control
from tests.system.wire import outcome, vector_job

SEED = int(os.environ.get("FL_TEST_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 31)
FEW, MANY = 6, 16  # kills in the ordinary suite, and in each of the repeats of `make soak`
ROUNDS_EACH = 5  # that clients may be ahead of the kills: none is left without a round to disturb
LONGEST = 0.2  # seconds that a server has until the next kill, at most
KEEP_ALL = {"keep_models": 10_000, "keep_update_rounds": 10_000}
NAMES = ("a", "b", "c", "d")


@pytest.mark.parametrize("repeat", REPEATED)
def test_what_was_accepted_counts_once_however_often_the_server_is_killed(tmp_path: Path, repeat: int) -> None:
    print(f"FL_TEST_SEED={SEED}")
    seed, kills = SEED + repeat, MANY if repeat else FEW
    rounds = ROUNDS_EACH * kills
    ledger = Ledger(seed)
    with FaultyFleet(tmp_path, KEEP_ALL) as fleet, Strangers(fleet, ledger, NAMES) as strangers:
        with Control(fleet.control) as control:
            job = vector_job(rounds=rounds, min_clients=3, model_args={"size": SIZE}, deadline_seconds=240)
            job_id = control.start_job(job).job_id
        for number in range(kills):
            strangers.may_reach(ROUNDS_EACH * (number + 1))
            disturb(fleet, strangers, random.Random(f"{seed} {number}"))
        strangers.may_reach(rounds)
        with Control(fleet.control) as control:
            ended = patiently(fleet, "the end of the job", lambda: outcome(control, job_id, control.follow_job(job_id)))
        strangers.stop()
        fleet.restart_server()
        fleet.server.kill()
        state, log = fleet.directory / "state" / "server", fleet.server.log.read_text()
    assert (ended.state, ended.rounds_done, ended.reason) == ("completed", rounds, "")
    assert ledger.surprises == []
    assert "Traceback" not in log
    check_files(state)
    counted = check_updates(state, ledger)
    check_models(state, ledger, rounds)
    print(f"{kills} kills, {counted} updates in {rounds} rounds; {ledger.summary()}")


def disturb(fleet: FaultyFleet, strangers: Strangers, rng: random.Random) -> None:
    """Kill the server at a random moment, now and then also while it starts, or a client before it."""
    wait(rng.uniform(0, LONGEST))
    if rng.random() < 0.5:
        strangers.kill(rng.choice(NAMES), spool=rng.random() < 0.5)
        wait(rng.uniform(0, 0.02))
    strangers.server_is_up.clear()
    fleet.server.kill()
    if rng.random() < 0.2:
        fleet.server.start()
        wait(rng.uniform(0, LONGEST))
        fleet.server.kill()
    fleet.start_server()
    strangers.server_is_up.set()


def wait(seconds: float) -> None:
    threading.Event().wait(seconds)


def check_files(state: Path) -> None:
    """The database is sound, every blob is what its name says, and there is none without a row."""
    assert ask(state, "PRAGMA integrity_check") == [("ok",)]
    named = {name for (name,) in ask(state, "SELECT blob FROM updates UNION SELECT blob FROM models") if name}
    files = {path.name: path for path in (state / "blobs").iterdir() if path.name != "state_id"}
    assert files.keys() == named
    for name, path in files.items():
        assert is_called(path.read_bytes(), name)
    # What the server tries the disk with may be in its hands when it is killed; the next start sweeps it.
    assert {path.name for path in (state / "partial").iterdir()} <= {"probe"}


def check_updates(state: Path, ledger: Ledger) -> int:
    """What clients were told is in the database, once, and what was refused is not; returns how many there are."""
    rows = ask(state, "SELECT round, client_id, digest, num_samples, length(blob) FROM updates")
    counted = {(number, client): digest for number, client, digest, _, _ in rows}
    assert len(counted) == len(rows)
    assert {key: counted.get(key) for key in ledger.told} == ledger.told
    assert [key for key in ledger.refused if counted.get(key[:2]) == key[2]] == []
    for number, client, digest, samples, blob in rows:
        offered = ledger.offered[number, client, digest]
        assert (samples, bool(blob)) == (offered.samples, offered.large)
    return len(rows)


def check_models(state: Path, ledger: Ledger, rounds: int) -> None:
    """Each round of the job has published one model: the mean of its accepted updates, added to the one before."""
    ended = ask(state, "SELECT job_round, phase, base_version, model_version FROM rounds ORDER BY round")
    assert ended == [(number, "published", number, number + 1) for number in range(1, rounds + 1)]
    models = ask(state, "SELECT version, round, base_version, digest FROM models ORDER BY version")
    assert [version for version, *_ in models] == list(range(1, rounds + 2))
    before = np.zeros(SIZE, np.float32)
    assert published(state, 1).tobytes() == before.tobytes()
    for version, number, base, digest in models[1:]:
        assert base == int(str(version)) - 1
        after = published(state, int(str(version)))
        assert after.tobytes() == recomputed(state, ledger, int(str(number)), before).tobytes(), f"model {version}"
        assert name_of(after.tobytes()) == digest
        before = after


def published(state: Path, version: int) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
    """The parameters in the version's file, which come last in it."""
    ((blob,),) = ask(state, "SELECT blob FROM models WHERE version = ?", version)
    return np.frombuffer((state / "blobs" / str(blob)).read_bytes()[-4 * SIZE :], "<f4")


def recomputed(
    state: Path, ledger: Ledger, number: int, base: "np.ndarray[tuple[int], np.dtype[np.float32]]"
) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
    """base + sum of n_i d_i / sum of n_i, in float64 in the order of the clients' names, rounded once."""
    total, samples = np.zeros(SIZE, np.float64), 0
    for client, digest in ask(
        state, "SELECT client_id, digest FROM updates WHERE round = ? ORDER BY client_id", number
    ):
        offered = ledger.offered[number, str(client), str(digest)]
        total += offered.samples * offered.values.astype(np.float64)
        samples += offered.samples
    return (base + total / samples).astype(np.float32)
