"""Makes protocol-1.tar.xz: what a server and three clients of protocol 1 left on their disks when they were killed.

    python -m tests.data.make_protocol_1

It was run once, with the code of commit eb6b679, the last one with protocol 1, schema version 4 of the database, and
SHA-256 as the only digest; it refuses to run with a newer protocol. The archive holds

    server/     a job of three rounds that has completed, and the first round of another one, in progress: the update of
                client-0 was accepted, and lies in a blob; so was that of client-1, which lies in a row of the database;
                that of client-2 was not, though it lies whole in partial/: the server died before it was named. The
                last transactions are only in SQLite's log
    client-0/   what its accepted update left out, in residual.safetensors
    client-1/   its update, spooled: the server died after it had accepted it, and before it said so. The residual is
                still the one before it
    client-2/   its update, spooled, that the server has not accepted, and the residual before it
    backup/     what `flctl backup` has made of server/

Both jobs train the same model on fedring.data:digits, with a server optimizer, and with downloads as deltas: models
come with deltas, the newest one also with the server's residual and its optimizer's state. client-0 has half of the
samples, client-2 a few, and client-1 a single one. So the update of client-1 is small: of a pixel that is black nothing
is learned.
"""

import os
import signal
import socket
import tarfile
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from fedring.rpc.contract import PROTOCOL
from fedring.train.loop import train
from fedring.train.losses import cross_entropy
from fedring.train.optimizers import sgd
from tests import forks
from tests.conftest import ROOT
from tests.fleets import Control, Fleet, until_watching
from tests.waiting import until

ARCHIVE = Path(__file__).with_name("protocol-1.tar.xz")
HIDDEN = 144  # units, for 10,810 parameters: four fifths of them, with their indices, do not fit into a row
DAY = 86_400
JOB: dict[str, Any] = {
    "model": "fedring.train.models:digits_mlp",
    "model_args": {"hidden": HIDDEN},
    "data": "fedring.data:digits",
    "download_encoding": "packed",
    "server_optimizer": {"name": "SGD", "args": {"lr": 1.0, "momentum": 0.5}},
    "min_clients": 3,
    "deadline_seconds": DAY,
}
FINISHED = {**JOB, "name": "finished", "rounds": 3, "encoding": "packed", "keep_ratio": 0.05}
RUNNING = {**JOB, "name": "running", "rounds": 2, "encoding": "fp32_sparse", "keep_ratio": 0.8}
PARTS = (2, 1437, 180)  # of which each client has one
LEFT_OUT = ("lock", "facts.sqlite-shm")  # the number of a process; SQLite's index of its log


def gated(model: nn.Module, samples: Any, plan: Any) -> Any:
    """Train as the built-in loop does, but first wait at the gate, if there is one."""
    if gate := os.environ.get("FL_TEST_GATE"):
        Path(gate + ".began").write_text("began")  # blocks until it is read
        Path(gate).read_text()  # blocks until it is written
    return train(model, samples, plan, loss=cross_entropy, optimizer_factory=sgd, device=torch.device("cpu"))


def main() -> None:
    """Make the archive."""
    if PROTOCOL != 1:
        raise SystemExit(
            f"this is protocol {PROTOCOL}: put this file into commit eb6b679, which speaks protocol 1, and run it there"
        )
    with TemporaryDirectory() as made:
        folder = Path(made)
        until_killed(folder)
        state = folder / "state"
        words = ("backup", state / "backup", "--state-dir", state / "server")
        done = forks.run("fedring.ctl.main", *words, timeout=60)
        if done.returncode:
            raise SystemExit(done.stderr)
        pack(state, forbidden=(made, str(ROOT), str(Path.home()), socket.gethostname()))
    print(f"{ARCHIVE}: {ARCHIVE.stat().st_size} bytes")


def until_killed(folder: Path) -> None:
    """Leave all the states in `folder`/state."""
    trainers = ("", f"{__spec__.name}:gated", f"{__spec__.name}:gated")
    clients = [
        {"partition_index": 0, "partition_count": count, "trainer": trainer}
        for count, trainer in zip(PARTS, trainers, strict=True)
    ]
    with Fleet(folder, {}, clients) as fleet:
        with Control(fleet.control) as control:
            until_watching(control, len(PARTS))
            run_to_its_end(control, FINISHED)
        fleet.server.send(signal.SIGTERM)  # the database's main file has all that was until now
        fleet.server.wait()
        gates = {index: folder / f"gate-{index}" for index in (1, 2)}
        for index, gate in gates.items():
            for path in (gate, gate.with_name(gate.name + ".began")):
                os.mkfifo(path)
            fleet.clients[index].env["FL_TEST_GATE"] = str(gate)
        fleet.start_server()
        for index in gates:
            fleet.restart(index)
        with Control(fleet.control) as control:
            until_watching(control, len(PARTS))
            events = control.events()
            control.start_job(RUNNING)
            for gate in gates.values():
                gate.with_name(gate.name + ".began").read_text()
            next(event for event in events if event.kind == "update_accepted" and event.client_id == "client-0")
            events.cancel()
        until(lambda: not is_spooled(folder, 0))  # it has been told
        fleet.clients[0].send(signal.SIGTERM)
        fleet.clients[0].wait()
        fleet.server.kill()
        for index, crash_at in ((2, "after_blob_fsync"), (1, "after_row_commit")):
            fleet.server.env["FL_CRASH_AT"] = crash_at
            fleet.start_server()
            with Control(fleet.control) as control:
                until_watching(control, index)  # this client, and what is left of the others
            gates[index].write_text("go on")
            fleet.server.wait()
            assert is_spooled(folder, index)
            fleet.clients[index].kill()


def run_to_its_end(control: Control, job: dict[str, Any]) -> None:
    """Run the job, which must complete."""
    events = control.events()
    job_id = control.start_job(job).job_id
    for _ in control.follow_job(job_id, events):
        pass
    assert control.job(job_id).state == "completed"


def is_spooled(folder: Path, index: int) -> bool:
    """Return whether an update of the client is to be delivered: its file begins with zeros if not."""
    path = folder / "state" / f"client-{index}" / "update"
    return path.exists() and any(path.read_bytes()[:8])


def pack(state: Path, forbidden: tuple[str, ...]) -> None:
    """Write the archive, which says nothing of when, where and by whom it was made."""
    with tarfile.open(ARCHIVE, "w:xz", preset=9) as archive:
        for path in sorted(state.rglob("*")):
            if path.name in LEFT_OUT:
                continue
            entry = tarfile.TarInfo(str(path.relative_to(state)))
            entry.mode = path.stat().st_mode & 0o777
            if path.is_dir():
                entry.type = tarfile.DIRTYPE
                archive.addfile(entry)
                continue
            data = path.read_bytes()
            for word in forbidden:
                assert len(word) < 4 or word.encode() not in data, f"{path} names {word}"
            entry.size = len(data)
            archive.addfile(entry, BytesIO(data))


if __name__ == "__main__":
    main()
