"""A state with an open round and with files of every kind, and what each of its models must be."""

import random
import shutil
import signal
import sqlite3
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from numpy.typing import NDArray

from fedring.codec import Encoding, decode, encode
from fedring.v1 import federation_pb2 as pb
from tests.damage import ask
from tests.fault.ledger import Update, drawn
from tests.fault.patience import patiently
from tests.fleets import Control, Fleet
from tests.system.wire import Refused, WireClient, vector_job

SIZE = 17_000  # of the model: an update of all its values is too large for a row, one of a few is not
NAMES = ("a", "b", "c")
ROUNDS = 4  # the last of which is open, and lacks what c delivers
LAST = ROUNDS + 1
"""The version that the open round will publish."""
RATE, MOMENTUM = 0.5, 0.9  # of the server's optimizer; a power of two is multiplied by without rounding
KINDS = (
    "model", "header", "update", "row", "delta", "residual", "optimizer",
    "facts", "wal", "shm", "state_id", "lock", "partial",
)  # fmt: skip
"""Of damage: to a blob, to an update that lies in its row, anywhere in the database's files, to the small files."""

Values = NDArray[np.float32]


@dataclass(slots=True)
class Prepared:
    """The state's folder, and the truth about it."""

    state: Path  # to be copied
    known: Path  # the same, to be asked
    settings: dict[str, Any]
    job_id: int = 0
    command: pb.TrainCmd = field(default_factory=pb.TrainCmd)  # of the open round
    updates: dict[str, Update] = field(default_factory=dict)  # of the open round, by client
    models: dict[int, Values] = field(default_factory=dict)

    def result(self, clients: frozenset[str]) -> Values:
        """What the open round publishes if these clients' updates count, computed from the undamaged files."""
        total, samples = np.zeros(SIZE, np.float64), 0
        for name in sorted(clients):
            update = self.updates[name]
            total += update.samples * update.values.astype(np.float64)
            samples += update.samples
        base = self.models[LAST - 1]
        remembered = safetensors.numpy.load_file(self.blob("optimizer_blob"))["momentum_buffer"]
        velocity = remembered * np.float32(MOMENTUM) - (total / samples).astype(np.float32)
        target = base - np.float32(RATE) * velocity
        owed = np.frombuffer(self.blob("residual_blob").read_bytes(), "<f4")
        wanted = target.astype(np.float64) + owed - base
        step = decode(encode(wanted.astype(np.float32), Encoding("uniform")), name="uniform", length=SIZE)
        moved: Values = np.add(base, step, dtype=np.float32)
        return moved

    def blob(self, column: str, version: int = LAST - 1) -> Path:
        """The file that this column of the version's row names."""
        ((name,),) = ask(self.known, f"SELECT {column} FROM models WHERE version = ?", version)
        return self.known / "blobs" / str(name)


def prepare(folder: Path) -> Prepared:
    """Train all rounds but the last, of which only c's update is missing, and kill the server."""
    prepared = Prepared(folder / "prepared", folder / "known", {"keep_models": 100, "keep_update_rounds": 100})
    with Fleet(folder, prepared.settings) as fleet:
        start(fleet, prepared)
        clients = [WireClient(fleet.listen, name) for name in NAMES]
        for number in range(1, LAST):
            for client in clients:
                train(fleet, prepared, client, number)
        for client in clients:
            client.close()
        fleet.server.send(signal.SIGTERM)  # the database's main file has all that was until now
        patiently(fleet, "the server's end", fleet.server.wait)
        fleet.start_server()
        with WireClient(fleet.listen, "a") as client:
            push(client, patiently(fleet, "a command", lambda: client.expect("train")), prepared.updates["a"])
        fleet.server.kill()
    for copy in (prepared.state, prepared.known):
        shutil.copytree(folder / "state" / "server", copy)
    for version in range(1, LAST):
        prepared.models[version] = np.frombuffer(prepared.blob("blob", version).read_bytes()[-4 * SIZE :], "<f4")
    return prepared


def start(fleet: Fleet, prepared: Prepared) -> None:
    """Start the job."""
    keys = {"rounds": ROUNDS, "min_clients": len(NAMES), "model_args": {"size": SIZE}, "deadline_seconds": 30}
    optimizer = {"name": "SGD", "args": {"lr": RATE, "momentum": MOMENTUM}}
    with Control(fleet.control) as control:
        job = vector_job(server_optimizer=optimizer, download_encoding="uniform", **keys)
        prepared.job_id = control.start_job(job).job_id


def train(fleet: Fleet, prepared: Prepared, client: WireClient, number: int) -> None:
    """Answer the client's command; of the last round, b alone delivers all, and c a part."""
    name = client.client_id
    prepared.command = patiently(fleet, "a command", lambda: client.expect("train"))
    update = prepared.updates[name] = drawn(f"{name} {number}", SIZE, large=name != "b")
    if number < ROUNDS or name == "b":
        push(client, prepared.command, update)
    elif name == "c":
        with pytest.raises(Refused, match="truncated"):
            push(client, prepared.command, update, stop_at=len(update.payload) // 2)


def push(client: WireClient, command: pb.TrainCmd, update: Update, *, stop_at: int | None = None) -> None:
    """Deliver the update, or its beginning."""
    header = client.header(command, update.payload, packets=[update.packet])
    reply = client.push(header, update.payload, stop_at=stop_at)
    assert reply is not None
    assert reply.HasField("accepted")


def file_of(prepared: Prepared, state: Path, kind: str, rng: random.Random) -> Path:
    """One of the files of this kind in `state`, a copy."""
    if kind in ("row", "facts"):
        ask(state, "PRAGMA wal_checkpoint(TRUNCATE)")  # else the -wal may have newer pages in the place of these
    if kind in ("row", "facts", "wal", "shm"):
        return state / {"wal": "facts.sqlite-wal", "shm": "facts.sqlite-shm"}.get(kind, "facts.sqlite")
    if kind in ("lock", "state_id"):
        return state / {"lock": "lock", "state_id": "blobs/state_id"}[kind]
    if kind == "partial":
        (path,) = (state / "partial").glob(f"{ROUNDS}-*")
        return path
    if kind == "update":
        return state / "blobs" / prepared.updates["a"].digest
    if kind == "delta":
        return state / "blobs" / prepared.blob("delta_blob", rng.randrange(2, LAST)).name
    if kind in ("model", "header"):
        return state / "blobs" / prepared.blob("blob", rng.randrange(1, LAST)).name
    return state / "blobs" / prepared.blob(f"{kind}_blob").name


def span_of(prepared: Prepared, path: Path, kind: str) -> tuple[int, int]:
    """The part of the file that is to be damaged: where it starts, and its bytes."""
    data = path.read_bytes()
    if kind == "row":
        payload = prepared.updates["b"].payload
        return data.index(payload), len(payload)
    return 0, len(data) - 4 * SIZE if kind == "header" else len(data)


def differences(prepared: Prepared, state: Path) -> list[str]:
    """What a copy of `state` says otherwise than it did, value by value, if SQLite finds it sound."""
    copy = state.with_name("looked-at")
    shutil.copytree(state, copy)
    try:
        ((sound,),) = ask(copy, "PRAGMA integrity_check(1)")
        if sound != "ok":
            return [f"integrity_check: {sound}"]
        before, after = values(prepared.known), values(copy)
        changed = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
        return [f"{len(changed)} values differ", *changed[:4]]
    except sqlite3.Error as error:
        return [f"SQLite: {error}"]
    finally:
        shutil.rmtree(copy)


def values(state: Path) -> dict[str, object]:
    """All values in the database, by table, row and column."""
    found: dict[str, object] = {}
    for (table,) in ask(state, "SELECT name FROM sqlite_master WHERE type = 'table'"):
        columns = [name for _, name, *_ in ask(state, f"PRAGMA table_info({table})")]
        for row in ask(state, f"SELECT rowid, * FROM {table}"):
            found |= {f"{table} {row[0]} {column}": value for column, value in zip(columns, row[1:], strict=True)}
    return found
