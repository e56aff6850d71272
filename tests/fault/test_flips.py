"""One bit of the state is flipped: whatever is published or served then is right, or it is refused with a reason.

Each flip hits another copy of one state. Its open round lacks one client's update; when that has come, and again
after a restart, every version is fetched whole and as a delta, exported, and loaded, and compared with what it was.
"""

import os
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from fedring.ctl.failure import Failure
from fedring.daemon.exits import Exit
from tests.conftest import REPEATED
from tests.damage import flip
from tests.fault.prepared import KINDS, LAST, Prepared, differences, file_of, prepare, span_of
from tests.fault.seen import Seen, deliver_last, look
from tests.fleets import Fleet
from tests.waiting import until

SEED = int(os.environ.get("FL_TEST_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 31)
FEW = 5  # flips in each of the repeats of `make soak`; the ordinary suite makes one of each kind
FACTS = ("facts", "wal")  # SQLite keeps no digests of rows: what is in them may change unnoticed
HARMLESS = ("lock", "partial", "shm")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepare(tmp_path_factory.mktemp("prepared"))


def test_without_damage_every_version_is_as_recomputed(prepared: Prepared, tmp_path: Path) -> None:
    fleet = copy_of(prepared, tmp_path)
    with fleet:
        assert deliver_last(fleet, prepared, facts=False) == ["accepted", "completed"]
        seen = look(fleet, prepared)
        fleet.server.kill()
    assert (seen.wrong, seen.refused) == ([], [])
    assert seen.right == 4 * LAST, "whole, as a delta, exported and loaded"


@pytest.mark.parametrize("repeat", REPEATED)
def test_nothing_wrong_is_served_after_a_bit_was_flipped(prepared: Prepared, tmp_path: Path, repeat: int) -> None:
    print(f"FL_TEST_SEED={SEED}")
    first = len(KINDS) + FEW * (repeat - 1) if repeat else 0
    for number in range(first, first + (FEW if repeat else len(KINDS))):
        check_one(prepared, tmp_path / str(number), number)


def check_one(prepared: Prepared, folder: Path, number: int) -> None:
    """Flip one bit in a copy of the state, before the server starts or while it runs, and see what follows."""
    turn, index = divmod(number, len(KINDS))
    kind, running = KINDS[index], (turn + index) % 2 == 1
    running = running and kind != "shm"  # which then is memory that the server shares
    rng = random.Random(f"{SEED} {number}")
    fleet = copy_of(prepared, folder)
    state = folder / "state" / "server"
    what: list[str] = []

    def damage() -> None:
        path = file_of(prepared, state, kind, rng)
        until(lambda: path.stat().st_size)  # SQLite begins the -wal with the first row that it writes
        start, size = span_of(prepared, path, kind)
        bit = 8 * start + rng.randrange(8 * size)
        flip(path, bit)
        what.append(f"{path.relative_to(state)} bit {bit}")
        what.extend(differences(prepared, state) if kind in FACTS and not running else [])

    try:
        outcome = live(fleet, prepared, kind, damage, running=running)
    finally:
        fleet.server.kill()
        fleet.server.close()
        print(f"{number}: {kind} {'running' if running else 'stopped'}: {'; '.join(what)}")
    print(f"    {' | '.join(outcome)}")
    if kind == "update" or (kind == "row" and not running):  # a running server knows the latter by heart
        assert f"without {'a' if kind == 'update' else 'b'}" in outcome
    if kind in HARMLESS:
        assert "completed" in outcome
        assert not any(word.startswith("refuse") for word in outcome)


def live(fleet: Fleet, prepared: Prepared, kind: str, damage: Callable[[], None], *, running: bool) -> list[str]:
    """What happens to the state, in a few words each, from the damage to the end of the server that follows."""
    outcome: list[str] = []
    if not running:
        damage()
    if not starts(fleet, outcome):
        return outcome
    if running:
        damage()
    outcome += deliver_last(fleet, prepared, facts=kind in FACTS)
    check_seen(look(fleet, prepared), kind, outcome)
    fleet.server.kill()
    outcome.append("restart")
    if starts(fleet, outcome):
        check_seen(look(fleet, prepared), kind, outcome)
    log = fleet.server.log.read_text()
    if "Traceback" in log:
        outcome.append("traceback")
        assert kind in FACTS, log
    return outcome


def starts(fleet: Fleet, outcome: list[str]) -> bool:
    """Whether the server starts; one that does not says why in one sentence."""
    before = fleet.server.log.stat().st_size if fleet.server.log.exists() else 0
    with suppress(Failure):
        fleet.start_server()
        return True
    words = fleet.server.log.read_text()[before:]
    assert fleet.server.poll() == Exit.CONFIG, words
    assert "Traceback" not in words
    outcome.append(f"refuses to start: {words.splitlines()[-1]}")
    return False


def check_seen(seen: Seen, kind: str, outcome: list[str]) -> None:
    """Everything is right or refused; of a damaged database it is enough that it fits its digest."""
    assert seen.unsound == [], outcome
    assert kind in FACTS or seen.wrong == [], outcome
    outcome.append(f"{seen.right} right" + (f", {len(seen.wrong)} others" if seen.wrong else ""))
    outcome.extend(f"refused {words}" for words in seen.refused)


def copy_of(prepared: Prepared, folder: Path) -> Fleet:
    """A fleet, not started, on a copy of the state."""
    shutil.copytree(prepared.state, folder / "state" / "server")
    (folder / "logs").mkdir()
    return Fleet(folder, prepared.settings)
