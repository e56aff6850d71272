"""One bit of a client's folder is flipped: it ends with a sentence, or goes on, and no round counts anything twice.

Each flip hits the folder as the last one has left it. A client that ends with 78 gets back the file, as its sentence
asks for. Then a round is published, and what it has done is recomputed.
"""

import os
import random
from collections import Counter
from pathlib import Path

import pytest

from fedring.daemon.exits import Exit
from tests.conftest import REPEATED, SEED
from tests.damage import flip
from tests.fault.flipped_clients import ChargedFleet, CorrectedFleet, FlippedFleet, MaskedFleet, PlainFleet

FLIPS = int(os.environ.get("FL_TEST_FLIPS", "10"))  # of each kind in each repeat of `make soak`; `make test` makes one
ONLY = os.environ.get("FL_TEST_KIND", "")
SOUND = ("client", "privacy.json", "secret", "signing.key", "secure/finished.json", "secure/released.json")
"""A client whose file of this kind is damaged does not start."""
TOLD = ("dropped", "damaged", "lost", "not used", "cannot be", "keeps the one that it had")


@pytest.mark.parametrize("repeat", REPEATED)
@pytest.mark.parametrize("fleet", [PlainFleet, CorrectedFleet, MaskedFleet, ChargedFleet])
def test_no_flipped_bit_of_a_client_counts_an_update_twice_or_shuts_it_out(
    tmp_path: Path, fleet: type[FlippedFleet], repeat: int
) -> None:
    rng = random.Random(f"{SEED} {repeat}")
    outcomes = Counter[tuple[str, str, str]]()
    with fleet(tmp_path) as flipped:
        for place, (kind, (_, crash)) in enumerate(flipped.kinds.items()):
            both = [False, True] if repeat else [place % 2 == 1]
            for running in [False] if crash else both:
                for number in range((FLIPS if repeat else 1) if ONLY in ("", kind) else 0):
                    outcome = check_flip(flipped, kind, rng, running=running)
                    print(f"{number} {kind} {'running' if running else 'stopped'}: {outcome}", flush=True)
                    outcomes[kind, "running" if running else "stopped", outcome] += 1
    for (kind, when, outcome), count in sorted(outcomes.items()):
        print(f"{kind} | {when} | {outcome} | {count}")


def check_flip(fleet: FlippedFleet, kind: str, rng: random.Random, *, running: bool) -> str:
    """Flip one bit of a file of a client, before it starts or while it runs; return what follows."""
    glob, crash = fleet.kinds[kind]
    ends, states = False, list[str]()
    if crash:
        fleet.run_round(crash)
    elif not running:
        fleet.stop_client()
    path = rng.choice(sorted(fleet.folder.glob(glob)))
    sound, log_size = path.read_bytes(), fleet.client.log.stat().st_size
    fleet.note_sound(path)
    flip(path, rng.randrange(8 * len(sound)))
    if running:
        states.append(fleet.run_round()[0])
        check_rounds(fleet)
        fleet.stop_client()
    if not fleet.starts():
        ends = True
        check_end(fleet, path)
        path.write_bytes(sound)
        assert fleet.starts(), fleet.client.tail()
    if crash:
        states.append(fleet.end_round()[0])
        for each in fleet.published():
            fleet.check(each)
    states.append(fleet.run_round()[0])
    words = check_rounds(fleet)
    if states[-1] != "completed":  # no client is shut out for more than one round
        states.append(fleet.run_round()[0])
        words = check_rounds(fleet)
    assert states[-1] == "completed", fleet.client.tail()
    log = fleet.client.log.read_bytes()[log_size:].decode()
    assert not [line for line in log.splitlines() if "Traceback" in line and "own model failed" not in line], log
    assert ends or running or kind not in SOUND
    fleet.note()
    parts = [*(["ends with 78"] if ends else []), *(["a round fails"] if "failed" in states else []), *sorted(words)]
    told = not ends and any(word in line for line in log.splitlines() for word in TOLD)
    return (", ".join(parts) or "harmless") + (", told" if told else "")


def check_rounds(fleet: FlippedFleet) -> set[str]:
    """Check all rounds that were published, and what the client keeps of them; return words for what is not right."""
    for each in fleet.published():
        fleet.check(each)
    return fleet.check_folder()


def check_end(fleet: FlippedFleet, path: Path) -> None:
    """Assert that the client has ended with 78 and one sentence that names the file."""
    assert fleet.client.poll() == Exit.CONFIG
    *_, before, last = fleet.client.log.read_text().splitlines()
    assert last.startswith("fl-client: "), last
    assert str(path) in last
    assert "in session" not in before, "the server would give a round to a client that ends"
