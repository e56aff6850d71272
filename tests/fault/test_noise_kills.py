"""A server with differential privacy that is killed again and again draws one noise for each set of updates."""

import json
import random
import shutil
from collections import defaultdict
from pathlib import Path

import pytest

from tests.conftest import SEED
from tests.damage import ask
from tests.fault.faulty_fleet import FaultyFleet, job_end, wait_for
from tests.fault.killable_clients import SIZE, KillableClients
from tests.fault.random_kills import KEEP_ALL, LONGEST, wait
from tests.fault.update_log import UpdateLog
from tests.fleets import Control
from tests.system.wire import vector_job

NAMES = ("a", "b", "c")
PLACE = "before_publish_commit"  # here a model is sealed that no row names yet

Noised = defaultdict[tuple[int, frozenset[str]], set[str]]
"""The names of the models that were sealed, by their round and the updates in it."""


@pytest.mark.slow
@pytest.mark.parametrize("kills", [10, pytest.param(200, marks=pytest.mark.soak)])
def test_one_noise_for_each_set_of_updates_however_often_the_server_is_killed(tmp_path: Path, kills: int) -> None:
    rng, update_log = random.Random(SEED), UpdateLog(SEED)
    sealed, secrets = Noised(set), set[bytes]()
    with FaultyFleet(tmp_path, KEEP_ALL) as fleet, KillableClients(fleet, update_log, NAMES) as clients:
        state = fleet.directory / "state" / "server"
        with Control(fleet.control) as control:
            dp = {"noise_multiplier": 1.0, "clip": 0.5, "adaptive": False}
            keys = {"min_clients": len(NAMES), "weights": "uniform", "model_args": {"size": SIZE}, "dp": dp}
            job_id = control.start_job(vector_job(rounds=2 * kills, deadline_seconds=240, **keys)).job_id
        for number in range(kills):
            clients.allow_rounds(2 * number + 1)
            if number % 2:
                wait_for(fleet, f"the crash {PLACE}", fleet.server.wait)
            else:
                wait(rng.uniform(0, LONGEST))
            clients.server_is_up.clear()
            fleet.server.kill()
            look(state, tmp_path / "copy", sealed, secrets)
            fleet.server.env.pop("FL_CRASH_AT", None)
            if number % 2 == 0:
                fleet.server.env["FL_CRASH_AT"] = PLACE
            fleet.start_server()
            clients.server_is_up.set()
        clients.allow_rounds(2 * kills)
        with Control(fleet.control) as control:
            job_end(fleet, control, job_id)
            ended = control.job(job_id)
            assert control.privacy().rounds == 2 * kills
        clients.stop()
        fleet.restart_server()
        fleet.server.kill()
        look(state, tmp_path / "copy", sealed, secrets)
    assert (ended.state, ended.rounds_done) == ("completed", 2 * kills)
    assert update_log.surprises == []
    assert len(sealed) == 2 * kills
    assert [key for key, names in sealed.items() if len(names) != 1] == []
    assert secrets
    print(f"{kills} kills, {len(sealed)} rounds, {len(secrets)} secrets were seen")
    kept = [path.read_bytes() for path in state.rglob("*") if path.is_file()]
    assert [secret for secret in secrets if any(secret in content for content in kept)] == []


def look(state: Path, copy: Path, sealed: Noised, secrets: set[bytes]) -> None:
    """Note which models lie in the state folder of a server that is dead, and the secrets that it has drawn."""
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(state, copy)  # to read the database changes its files
    secrets.update(path.read_bytes() for path in copy.glob("noise-*"))
    secrets.discard(bytes(32))  # one that was overwritten, and is about to be removed
    accepted = defaultdict[int, set[str]](set)
    for number, name in ask(copy, "SELECT round, name FROM updates"):
        accepted[int(str(number))].add(str(name))
    for path in (copy / "blobs").glob("blake3-*"):
        if number := round_of(path):
            sealed[number, frozenset(accepted[number])].add(path.name)


def round_of(path: Path) -> int:
    """Return the round that a model file names; 0 if the file is a first model, or an update."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    try:
        return int(json.loads(data[8 : 8 + length])["__metadata__"]["round"])
    except (ValueError, KeyError):
        return 0
