"""What was acknowledged survives kill -9 at any moment (promise P2), and a sweep leaves nothing else."""

import hashlib
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from fedring.daemon.crash import REGISTERED
from fedring.server.blobs import FileBlobs
from fedring.server.packets import PacketSpec
from fedring.server.rows import JobRow, ModelRow, RoundRow, UpdateRow
from fedring.server.store import Acceptance, SqlStore

SEED = int(os.environ.get("FL_TEST_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 31)
ROOT = Path(__file__).parents[2]
BATCH = 4
POINTS = sorted(name for name in REGISTERED if name.split("_")[1] in ("blob", "row", "publish"))


def open_state(root: Path) -> tuple[FileBlobs, SqlStore]:
    return FileBlobs(root), SqlStore(f"sqlite:///{root / 'facts.sqlite'}")


def accept_for_ever(root: Path, crash_at: str) -> None:
    """The child: publishes round after round, prints what is durable, and dies at `crash_at` in its third round."""
    blobs, store = open_state(root)
    blobs.sweep(store.named_blobs())
    job = store.create_job(JobRow(0, "kill", {}, 1 << 20, 0.0))
    while True:
        opened = store.create_round(RoundRow(0, job.job_id, 1, "training", 0.0))
        if opened.round % 3 == 0 and crash_at:
            os.environ["FL_CRASH_AT"] = crash_at
        rows, partials = [], []
        for client in range(BATCH):
            partial = blobs.open_partial(f"{opened.round}-{client}")
            for chunk in range(4):
                partial.write(f"{opened.round} {client} {chunk} ".encode() * 2000)
            packets = (PacketSpec("parameters", "delta", "fp32", 0, partial.size),)
            row = UpdateRow(
                opened.round, str(client), partial.digest, packets, 1, partial.size, 0.0, 0.0, 0.0, blob=partial.digest
            )
            rows.append(row)
            partials.append(partial)
        blobs.seal_many(partials)
        if store.accept_updates(rows) != [Acceptance.NEW] * BATCH:
            raise SystemExit("an update was not new")
        for row in rows:
            print("update", row.round, row.client_id, row.digest, flush=True)
        model = blobs.open_partial("model", fresh=True)
        model.write(f"model {opened.round}".encode() * 100)
        size, blob = model.size, blobs.seal(model)
        ended = RoundRow(opened.round, job.job_id, 1, "published", 0.0, ended_at=1.0, model_version=opened.round)
        store.publish(ModelRow(opened.round, opened.round, blob, blob, "", 1, size, 0.0), ended)
        print("model", opened.round, opened.round, blob, flush=True)


def run_child(root: Path, crash_at: str, *, kill_after: int) -> list[list[str]]:
    """What the child acknowledged until it died: at `crash_at`, or killed after so many lines."""
    path = os.pathsep.join(str(ROOT / part) for part in ("server", "common", "protos"))
    command = [sys.executable, __file__, str(root), crash_at]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}) as child:
        if child.stdout is None:
            raise RuntimeError("no output")
        lines = []
        for line in child.stdout:
            lines.append(line)
            if not crash_at and len(lines) == kill_after:
                child.kill()
        child.wait(120)
    assert child.returncode == (137 if crash_at else -9)
    return [line.split() for line in lines if line.endswith("\n")]


def check_state(root: Path, acknowledged: list[list[str]]) -> None:
    """All that was acknowledged is there, all that is named is whole, and a sweep leaves nothing else."""
    blobs, store = open_state(root)
    for kind, number, name, digest in acknowledged:
        if kind == "update":
            assert {row.client_id: row.digest for row in store.updates_of(int(number))}[name] == digest
        else:
            model, ended = store.model(int(name)), store.round(int(number))
            assert model is not None
            assert ended is not None
            assert (model.blob, ended.phase) == (digest, "published")
    named = store.named_blobs()
    blobs.sweep(named)
    assert {path.name for path in (root / "blobs").iterdir()} == named
    assert blobs.partials() == []
    for digest in named:
        with blobs.reader(digest) as blob:
            assert hashlib.sha256(blob.read(0, blob.size)).hexdigest() == digest
    blobs.close()
    store.close()


@pytest.mark.parametrize("point", POINTS)
def test_what_was_acknowledged_survives_every_crash_point(tmp_path: Path, point: str) -> None:
    acknowledged = run_child(tmp_path, point, kill_after=0)
    assert len([line for line in acknowledged if line[0] == "update"]) >= 2 * BATCH
    check_state(tmp_path, acknowledged)


def test_what_was_acknowledged_survives_kills_at_random(tmp_path: Path) -> None:
    print(f"FL_TEST_SEED={SEED}")
    rng = random.Random(SEED)
    acknowledged = []
    for _ in range(6):
        acknowledged += run_child(tmp_path, "", kill_after=rng.randrange(1, 30))
        check_state(tmp_path, acknowledged)
    assert len(acknowledged) >= 6


if __name__ == "__main__":
    accept_for_ever(Path(sys.argv[1]), sys.argv[2])
