"""One bit of the state is flipped: the server then publishes and serves right values, or refuses with a reason.

Each flip hits another copy of one state, whose open round lacks one client's update. When the client has delivered it,
and again after a restart, every version is fetched whole and as a delta, exported, and loaded, and compared with what
it must be.
"""

import os
import random
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import grpc
import pytest

from fedring.control.failure import Failure
from fedring.daemon.exits import Exit
from tests.conftest import REPEATED, SEED
from tests.damage import ask, flip
from tests.fault.faulty_fleet import SECONDS
from tests.fault.prepared_state import KINDS, LAST, NAMES, ROUNDS, PreparedState, differences, file_of, prepare, span_of
from tests.fault.served_models import Downloads, deliver_missing_update, read_all_versions
from tests.fleets import Fleet
from tests.system.wire import Refused
from tests.waiting import until

FEW = 5  # flips in each repeat of `make soak`; `make test` makes one of each kind
FACTS = ("facts", "wal")
LOOSE = re.compile(r"events |updates \d+ payload$")
"""What the digests of rows do not cover: payloads have their own, and nothing depends on the others."""
ONLY = os.environ.get("FL_TEST_KIND", "")  # all flips hit files of this kind
HARMLESS = ("lock", "partial", "shm", "unnamed")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> PreparedState:
    """Make the state of which each flip gets a copy."""
    return prepare(tmp_path_factory.mktemp("prepared"))


def test_without_damage_every_version_has_the_recomputed_values(prepared: PreparedState, tmp_path: Path) -> None:
    fleet = copy_of(prepared, tmp_path)
    with fleet:
        assert deliver_missing_update(fleet, prepared, facts=False) == ["accepted", "completed"]
        seen = read_all_versions(fleet, prepared)
        fleet.server.kill()
    assert (seen.wrong, seen.refused) == ([], [])
    assert seen.right == 4 * LAST, "whole, as a delta, exported and loaded"


@pytest.mark.parametrize("repeat", REPEATED)
def test_nothing_wrong_is_served_after_a_bit_was_flipped(prepared: PreparedState, tmp_path: Path, repeat: int) -> None:
    first = len(KINDS) + FEW * (repeat - 1) if repeat else 0
    for number in range(first, first + (FEW if repeat else len(KINDS))):
        check_flip(prepared, tmp_path / str(number), number)


def check_flip(prepared: PreparedState, folder: Path, number: int) -> None:
    """Flip one bit in a copy of the state, before the server starts or while it runs, and check what follows."""
    turn, index = divmod(number, len(KINDS))
    kind, running = ONLY or KINDS[index], (turn + index) % 2 == 1
    running = running and kind != "shm"  # a running server maps it as shared memory
    rng = random.Random(f"{SEED} {number}")
    fleet = copy_of(prepared, folder)
    state = folder / "state" / "server"
    what: list[str] = []
    changed: list[str] = []

    def damage() -> None:
        path = file_of(prepared, state, kind, rng)
        until(lambda: path.stat().st_size)  # SQLite creates the -wal when it first writes a row
        start, size = span_of(prepared, path, kind)
        bit = 8 * start + rng.randrange(8 * size)
        flip(path, bit)
        what.append(f"{path.relative_to(state)} bit {bit}")
        changed.extend(differences(prepared, state) if kind in FACTS and not running else [])

    try:
        outcome = run_damaged(fleet, prepared, kind, damage, running=running)
    except (Failure, Refused, grpc.RpcError):  # it has met a row that it cannot read
        if kind not in FACTS or fleet.server.wait(SECONDS) != Exit.FAILED:
            raise
        (end,) = re.findall("cannot go on: [^(]*", fleet.server.log.read_text())
        outcome = [f"ends: {end}"]
    finally:
        fleet.server.kill()
        fleet.server.close()
        print(f"{number}: {kind} {'running' if running else 'stopped'}: {'; '.join(what + changed[:4])}")
    print(f"    {' | '.join(outcome)}")
    if kind == "update" or (kind == "row" and not running):  # a running server has the row in memory
        assert f"without {'a' if kind == 'update' else 'b'}" in outcome
    if any(not LOOSE.match(key) for key in changed):
        assert outcome[0].startswith("refuses to start"), (changed, outcome)
    if kind == "wal" and not running:
        assert "lost_commits: facts.sqlite-wal is damaged" in outcome[0], outcome
    if kind in HARMLESS:
        assert "completed" in outcome
        assert not any(word.startswith("refuse") for word in outcome)


def run_damaged(
    fleet: Fleet, prepared: PreparedState, kind: str, damage: Callable[[], None], *, running: bool
) -> list[str]:
    """Damage the state, run the server twice on it, and return a few words for each thing that happens."""
    outcome: list[str] = []
    if not running:
        damage()
    if not starts(fleet, outcome):
        return outcome
    if running:
        damage()
    outcome += deliver_missing_update(fleet, prepared, facts=kind in FACTS)
    check_downloads(read_all_versions(fleet, prepared), outcome)
    fleet.server.kill()
    outcome.append("restart")
    if starts(fleet, outcome):
        check_downloads(read_all_versions(fleet, prepared), outcome)
        check_accepted(fleet, prepared, outcome)
    log = fleet.server.log.read_text()
    if "Traceback" in log:
        outcome.append("traceback")
        assert kind in FACTS, log
    return outcome


def starts(fleet: Fleet, outcome: list[str]) -> bool:
    """Start the server; return whether it runs. If it does not, its log must end with the reason in one sentence."""
    before = fleet.server.log.stat().st_size if fleet.server.log.exists() else 0
    with suppress(Failure):
        fleet.start_server()
        return True
    words = fleet.server.log.read_text()[before:]
    assert fleet.server.poll() == Exit.CONFIG, words
    assert "Traceback" not in words
    outcome.append(f"refuses to start: {words.splitlines()[-1]}")
    return False


def check_downloads(seen: Downloads, outcome: list[str]) -> None:
    """Assert that all values are right or refused."""
    assert (seen.wrong, seen.unsound) == ([], []), outcome
    outcome.append(f"{seen.right} right")
    outcome.extend(f"refused {words}" for words in seen.refused)


def check_accepted(fleet: Fleet, prepared: PreparedState, outcome: list[str]) -> None:
    """Assert that all accepted updates are still there, but for those without which the round says that it ended."""
    rows = ask(fleet.directory / "state" / "server", "SELECT client_id FROM updates WHERE round = ?", ROUNDS)
    left_out = {name for word in outcome if word.startswith("without ") for name in word[8:].split(", ")}
    wanted = {*NAMES[:2], *(NAMES[2:] if outcome[0] == "accepted" else ())}
    assert wanted - left_out <= {row[0] for row in rows}, outcome


def copy_of(prepared: PreparedState, folder: Path) -> Fleet:
    """Return a fleet, not started, whose server has a copy of the state."""
    shutil.copytree(prepared.state, folder / "state" / "server")
    (folder / "logs").mkdir()
    return Fleet(folder, prepared.settings)
