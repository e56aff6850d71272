"""Make a state folder in the middle of a round, as a killed server leaves it, and compare such folders."""

import hashlib
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from fedring.codec.digest import is_called
from fedring.server.state.backup.contents import Manifest, read_contents
from tests.fleets import Control, Fleet
from tests.system.wire import WireClient, deliver, payload_of, run

SIZE = 50_000  # of the model: an update of it is too large for a row of the database
JOB: dict[str, Any] = {
    "model_args": {"size": SIZE},
    "min_clients": 2,
    "rounds": 4,
    "download_encoding": "uniform",
    "server_optimizer": {"name": "SGD", "args": {"lr": 1.0, "momentum": 0.9}},
    "deadline_seconds": 240,
}
_DURING_ONE = 6  # models that are published during a backup, which tries ten times


def push(client: WireClient, seed: int, size: int = SIZE) -> None:
    """Answer the client's next command with `size` values of noise; few of them fit into a row of the database."""
    noise = np.random.default_rng(seed).standard_normal(size).astype(np.float32)
    command, payload = client.expect("train"), payload_of(noise)
    client.push(client.header(command, payload), payload)


def make_state_with_open_round(folder: Path, rounds: int = 2) -> Path:
    """Train so many rounds, kill the server when one of two clients has delivered for the next, return its state."""
    with Fleet(folder) as fleet, Control(fleet.control) as control:
        with WireClient(fleet.listen, "a") as a, WireClient(fleet.listen, "b") as b:
            run(control, **JOB)
            for number in range(rounds):
                push(a, 2 * number)
                push(b, 2 * number + 1)
            push(a, 100)
        fleet.server.kill()
    return folder / "state" / "server"


def made_while_publishing(
    fleet: Fleet, control: Control, count: int, back_up: Callable[[int], Manifest]
) -> list[Manifest]:
    """Make so many backups, each while the server publishes models and deletes those before.

    There are few enough of them for a backup that is slow, since a busy machine may let the server publish more often
    than a backup tries.
    """
    ends, accepted, wanted = threading.Event(), threading.Semaphore(0), threading.Semaphore(0)
    with WireClient(fleet.listen, "a") as client:
        run(control, rounds=10_000, model_args={"size": SIZE})

        def train() -> None:
            while wanted.acquire() and not ends.is_set():
                deliver(client, np.ones(SIZE, np.float32))
                accepted.release()

        trainer = threading.Thread(target=train)
        trainer.start()
        try:
            made = []
            for number in range(count):
                while wanted.acquire(blocking=False):  # what the backup before has left
                    pass
                wanted.release(_DURING_ONE)
                accepted.acquire()
                made.append(back_up(number))
        finally:
            ends.set()
            wanted.release()
            trainer.join()
    return made


def files(folder: Path) -> dict[str, str]:
    """Return the digest of every file in the folder by its path there, without the lock and SQLite's index."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in ("lock", "facts.sqlite-shm")
    }


def rows(state: Path) -> dict[str, list[Any]]:
    """Return all rows of the database by table, including those that are only in its log so far."""
    with _database_copy(state) as facts, closing(sqlite3.connect(facts)) as database:
        names = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {name: sorted(database.execute(f"SELECT * FROM {name}"), key=repr) for name in names}


def is_complete(state: Path) -> bool:
    """Return whether every blob that the database names exists and has the digest that is its name."""
    with _database_copy(state) as facts:
        named = [state / "blobs" / blob.digest for blob in read_contents(facts).blobs]
    return all(path.exists() and is_called(path.read_bytes(), path.name) for path in named)


@contextmanager
def _database_copy(state: Path) -> Iterator[Path]:
    """Copy the database and yield the copy's path; to open the database itself would change it and end its log."""
    with TemporaryDirectory() as folder:
        for path in state.glob("facts.sqlite*"):
            shutil.copy(path, folder)
        copy = Path(folder) / "facts.sqlite"
        with closing(sqlite3.connect(copy)) as database:
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)").close()
        yield copy


def blob_kinds() -> Iterator[tuple[str, str]]:
    """Yield, for each kind of blob, a query for the name of one, and how error messages call that blob."""
    for column, words in (
        ("blob", "model 2"),
        ("delta_blob", "the delta to model 2"),
        ("residual_blob", "the residual of model 3"),
        ("optimizer_blob", "the optimizer state of model 3"),
    ):
        yield f"SELECT {column} FROM models WHERE version = {words[-1]}", words
    yield "SELECT blob FROM updates WHERE round = 3", "the update of a in round 3"
