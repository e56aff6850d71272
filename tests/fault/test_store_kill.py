"""Everything that was acknowledged survives kill -9 at any moment, and a sweep deletes everything else."""

import random
import subprocess
from pathlib import Path

import pytest

from fedring.codec.digest import name_of
from fedring.daemon.crash import REGISTERED
from tests.conftest import REPEATED, SEED
from tests.fault.publisher import BATCH, open_state
from tests.forks import Fork

POINTS = sorted(name for name in REGISTERED if name.split("_")[1] in ("blob", "row", "publish"))


def run_child(root: Path, crash_at: str, *, kill_after: int) -> list[list[str]]:
    """Run a publisher that dies at `crash_at`, or is killed after so many lines; return what it acknowledged."""
    arguments = [str(root), crash_at]
    child = Fork("tests.fault.publisher", arguments, stdout=subprocess.PIPE)
    assert child.stdout is not None
    with child.stdout:
        lines = []
        for line in child.stdout:
            lines.append(line.decode())
            if not crash_at and len(lines) == kill_after:
                child.kill()
    assert child.wait(120) == (137 if crash_at else -9)
    return [line.split() for line in lines if line.endswith("\n")]


def check_state(root: Path, acknowledged: list[list[str]]) -> None:
    """Assert that acknowledged rows exist, that named blobs are undamaged, and that a sweep deletes all others."""
    blobs, store = open_state(root)
    for kind, number, name, digest in acknowledged:
        if kind == "update":
            assert {row.client_id: row.digest for row in store.updates.of_round(int(number))}[name] == digest
        else:
            model, ended = store.models.get(int(name)), store.rounds.get(int(number))
            assert model is not None
            assert ended is not None
            assert (model.blob, ended.phase) == (digest, "published")
    named = store.named_blobs()
    blobs.sweep(named)
    assert {path.name for path in (root / "blobs").iterdir()} == named
    assert blobs.partials() == []
    for digest in named:
        with blobs.reader(digest) as blob:
            assert name_of(blob.read(0, blob.size)) == digest
    blobs.close()
    store.close()


@pytest.mark.parametrize("point", POINTS)
def test_acknowledged_updates_and_models_survive_every_crash_point(tmp_path: Path, point: str) -> None:
    acknowledged = run_child(tmp_path, point, kill_after=0)
    assert len([line for line in acknowledged if line[0] == "update"]) >= 2 * BATCH
    check_state(tmp_path, acknowledged)


@pytest.mark.parametrize("repeat", REPEATED)
def test_acknowledged_updates_and_models_survive_random_kills(tmp_path: Path, repeat: int) -> None:
    rng = random.Random(SEED + repeat)
    acknowledged = []
    for _ in range(6):
        acknowledged += run_child(tmp_path, "", kill_after=rng.randrange(1, 30))
        check_state(tmp_path, acknowledged)
    assert len(acknowledged) >= 6
