"""A server's state with an open round and with files of every kind, and the correct values of all its models."""

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
from fedring.codec.digest import name_of
from fedring.v1 import federation_pb2 as pb
from tests.damage import ask, last_commit_of
from tests.fault.faulty_fleet import wait_for
from tests.fault.update_log import Update, random_update
from tests.fleets import Control, Fleet
from tests.system.wire import Refused, WireClient, vector_job

SIZE = 17_000  # of the model: an update of all its values is too large for a row of the database
NAMES = ("a", "b", "c")
ROUNDS = 4  # the last round is open, and lacks only the update of c
LAST = ROUNDS + 1
"""The model version that the open round will publish."""
RATE, MOMENTUM = 0.5, 0.9  # of the server's optimizer; to multiply by a power of two rounds nothing
KINDS = (
    "model", "header", "update", "row", "delta", "residual", "optimizer",
    "facts", "wal", "shm", "state_id", "lock", "partial", "unnamed",
)  # fmt: skip
"""Kinds of damage: to a blob, to an update in its row, anywhere in the database's files, and to the small files."""

Values = NDArray[np.float32]


@dataclass(slots=True)
class PreparedState:
    """The folder of the state, and what it must contain."""

    state: Path  # tests damage copies of it
    known: Path  # a copy for queries, which would change the -wal
    settings: dict[str, Any]
    job_id: int = 0
    command: pb.TrainCmd = field(default_factory=pb.TrainCmd)  # of the open round
    updates: dict[str, Update] = field(default_factory=dict)  # of the open round, by client
    models: dict[int, Values] = field(default_factory=dict)

    def expected_result(self, clients: frozenset[str]) -> Values:
        """Compute from the undamaged files what the open round publishes if it counts these clients' updates."""
        total, samples = np.zeros(SIZE, np.float64), 0
        for name in sorted(clients):
            update = self.updates[name]
            total += update.samples * update.values.astype(np.float64)
            samples += update.samples
        base = self.models[LAST - 1]
        remembered = safetensors.numpy.load_file(self.blob("optimizer_blob"))["momentum_buffer"]
        velocity = remembered * np.float32(MOMENTUM) - (total / samples).astype(np.float32)
        target = base - np.float32(RATE) * velocity
        residual = np.frombuffer(self.blob("residual_blob").read_bytes(), "<f4")
        wanted = target.astype(np.float64) + residual - base
        step = decode(encode(wanted.astype(np.float32), Encoding("uniform")), name="uniform", length=SIZE)
        moved: Values = np.add(base, step, dtype=np.float32)
        return moved

    def blob(self, column: str, version: int = LAST - 1) -> Path:
        """Return the file that this column of the version's row names."""
        ((name,),) = ask(self.known, f"SELECT {column} FROM models WHERE version = ?", version)
        return self.known / "blobs" / str(name)


def prepare(folder: Path) -> PreparedState:
    """Train rounds until only the update of c is missing from the last one, and kill the server."""
    prepared = PreparedState(folder / "prepared", folder / "known", {"keep_models": 100, "keep_update_rounds": 100})
    with Fleet(folder, prepared.settings) as fleet:
        start_job(fleet, prepared)
        clients = [WireClient(fleet.listen, name) for name in NAMES]
        for number in range(1, LAST):
            for client in clients:
                train(fleet, prepared, client, number)
        for client in clients:
            client.close()
        fleet.server.send(signal.SIGTERM)  # moves everything so far into the database's main file
        wait_for(fleet, "the server's end", fleet.server.wait)
        fleet.start_server()
        with WireClient(fleet.listen, "a") as client:
            push(client, wait_for(fleet, "a command", lambda: client.expect("train")), prepared.updates["a"])
        fleet.server.kill()
    for copy in (prepared.state, prepared.known):
        shutil.copytree(folder / "state" / "server", copy)
    (prepared.state / "unnamed").mkdir()
    (prepared.state / "unnamed" / name_of(b"unnamed")).write_bytes(b"unnamed")
    for version in range(1, LAST):
        prepared.models[version] = np.frombuffer(prepared.blob("blob", version).read_bytes()[-4 * SIZE :], "<f4")
    return prepared


def start_job(fleet: Fleet, prepared: PreparedState) -> None:
    """Start a job of ROUNDS rounds for all clients."""
    keys = {"rounds": ROUNDS, "min_clients": len(NAMES), "model_args": {"size": SIZE}, "deadline_seconds": 30}
    optimizer = {"name": "SGD", "args": {"lr": RATE, "momentum": MOMENTUM}}
    with Control(fleet.control) as control:
        job = vector_job(server_optimizer=optimizer, download_encoding="uniform", **keys)
        prepared.job_id = control.start_job(job).job_id


def train(fleet: Fleet, prepared: PreparedState, client: WireClient, number: int) -> None:
    """Answer the client's command; in the last round b delivers its update, c a part of it, and a nothing."""
    name = client.client_id
    prepared.command = wait_for(fleet, "a command", lambda: client.expect("train"))
    update = prepared.updates[name] = random_update(f"{name} {number}", SIZE, large=name != "b")
    if number < ROUNDS or name == "b":
        push(client, prepared.command, update)
    elif name == "c":
        with pytest.raises(Refused, match="truncated"):
            push(client, prepared.command, update, stop_at=len(update.payload) // 2)


def push(client: WireClient, command: pb.TrainCmd, update: Update, *, stop_at: int | None = None) -> None:
    """Deliver the update, or its first `stop_at` bytes."""
    header = client.header(command, update.payload, packets=[update.packet])
    reply = client.push(header, update.payload, stop_at=stop_at)
    assert reply is not None
    assert reply.HasField("accepted")


def file_of(prepared: PreparedState, state: Path, kind: str, rng: random.Random) -> Path:
    """Return a file of this kind in `state`, which is a copy; `rng` decides which if there are several."""
    if kind in ("row", "facts"):
        ask(state, "PRAGMA wal_checkpoint(TRUNCATE)")  # otherwise the -wal may hold newer pages than the main file
    if kind in ("row", "facts", "wal", "shm"):
        return state / {"wal": "facts.sqlite-wal", "shm": "facts.sqlite-shm"}.get(kind, "facts.sqlite")
    if kind in ("lock", "state_id"):
        return state / {"lock": "lock", "state_id": "blobs/state_id"}[kind]
    if kind == "partial":
        (path,) = (state / "partial").glob(f"{ROUNDS}-*")
        return path
    if kind == "unnamed":
        return state / "unnamed" / name_of(b"unnamed")
    if kind == "update":
        return state / "blobs" / prepared.updates["a"].digest
    if kind == "delta":
        return state / "blobs" / prepared.blob("delta_blob", rng.randrange(2, LAST)).name
    if kind in ("model", "header"):
        return state / "blobs" / prepared.blob("blob", rng.randrange(1, LAST)).name
    return state / "blobs" / prepared.blob(f"{kind}_blob").name


def span_of(prepared: PreparedState, path: Path, kind: str) -> tuple[int, int]:
    """Return the part of the file that is to be damaged: its offset and its length in bytes."""
    data = path.read_bytes()
    if kind == "row":
        payload = prepared.updates["b"].payload
        return data.index(payload), len(payload)
    if kind == "wal":  # damage in the last commit may be a write that was cut short
        return 0, last_commit_of(path)
    return 0, len(data) - 4 * SIZE if kind == "header" else len(data)


def differences(prepared: PreparedState, state: Path) -> list[str]:
    """Return which values in the database in `state` are not the right ones, or what SQLite finds wrong."""
    copy = state.with_name("compared")
    shutil.copytree(state, copy)
    try:
        ((sound,),) = ask(copy, "PRAGMA integrity_check(1)")
        if sound != "ok":
            return [f"integrity_check: {sound}"]
        before, after = values(prepared.known), values(copy)
        return sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
    except (sqlite3.Error, UnicodeDecodeError) as error:
        return [f"SQLite: {error}"]
    finally:
        shutil.rmtree(copy)


def values(state: Path) -> dict[str, object]:
    """Return all values in the database, by table, row and column."""
    found: dict[str, object] = {}
    for (table,) in ask(state, "SELECT name FROM sqlite_master WHERE type = 'table'"):
        columns = [name for _, name, *_ in ask(state, f"PRAGMA table_info({table})")]
        for row in ask(state, f"SELECT rowid, * FROM {table}"):
            found |= {f"{table} {row[0]} {column}": value for column, value in zip(columns, row[1:], strict=True)}
    return found
