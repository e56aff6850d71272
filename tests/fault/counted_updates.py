"""The check of a whole state after kills: each confirmed update counts once, and each model can be recomputed."""

from pathlib import Path
from typing import Protocol

import numpy as np
import obstore
from sqlalchemy import NullPool, create_engine, text

from fedring.codec.digest import name_of
from fedring.server.state.shared.object_blobs import open_objects
from tests.damage import ask
from tests.fault.killable_clients import SIZE
from tests.fault.update_log import UpdateLog


class State(Protocol):
    """A state that no server uses now."""

    def ask(self, query: str, *values: object) -> list[tuple[object, ...]]:
        """Run a query on the database; its values stand in the places of question marks."""
        ...

    def blob(self, digest: str) -> bytes:
        """Return a blob."""
        ...


class FolderState:
    """The state in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def ask(self, query: str, *values: object) -> list[tuple[object, ...]]:
        return ask(self._folder, query, *values)

    def blob(self, digest: str) -> bytes:
        return (self._folder / "blobs" / digest).read_bytes()


class SharedState:
    """The state in a database and an object store."""

    def __init__(self, database: str, blob_url: str) -> None:
        self._engine, self._objects = create_engine(database, poolclass=NullPool), open_objects(blob_url)

    def ask(self, query: str, *values: object) -> list[tuple[object, ...]]:
        names = {f"v{number}": value for number, value in enumerate(values)}
        for name in names:
            query = query.replace("?", f":{name}", 1)
        with self._engine.connect() as connection:
            return [tuple(row) for row in connection.execute(text(query), names)]

    def blob(self, digest: str) -> bytes:
        keys = [meta["path"] for batch in obstore.list(self._objects, "blobs/") for meta in batch]
        return bytes(obstore.get(self._objects, next(key for key in keys if key.endswith(digest))).bytes())


def check_updates(state: State, update_log: UpdateLog) -> int:
    """Assert that confirmed updates are in the database once, and refused ones are not; return how many there are."""
    rows = state.ask("SELECT round, client_id, digest, num_samples, length(blob) FROM updates")
    accepted = {(number, client): digest for number, client, digest, _, _ in rows}
    assert len(accepted) == len(rows)
    assert {key: accepted.get(key) for key in update_log.confirmed} == update_log.confirmed
    assert [key for key in update_log.refused if accepted.get(key[:2]) == key[2]] == []
    for number, client, digest, samples, blob in rows:
        offered = update_log.offered[number, client, digest]
        assert (samples, bool(blob)) == (offered.samples, offered.large)
    return len(rows)


def check_models(state: State, update_log: UpdateLog, rounds: int) -> None:
    """Assert that each round has published one model: the previous one plus the mean of its accepted updates."""
    ended = state.ask("SELECT job_round, phase, base_version, model_version FROM rounds ORDER BY round")
    assert ended == [(number, "published", number, number + 1) for number in range(1, rounds + 1)]
    models = state.ask("SELECT version, round, base_version, digest FROM models ORDER BY version")
    assert [version for version, *_ in models] == list(range(1, rounds + 2))
    before = np.zeros(SIZE, np.float32)
    assert published(state, 1).tobytes() == before.tobytes()
    for version, number, base, digest in models[1:]:
        assert base == int(str(version)) - 1
        after = published(state, int(str(version)))
        assert after.tobytes() == recomputed(state, update_log, int(str(number)), before).tobytes(), f"model {version}"
        assert name_of(after.tobytes()) == digest
        before = after


def published(state: State, version: int) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
    """Return the parameters in the version's file, which are its last bytes."""
    ((blob,),) = state.ask("SELECT blob FROM models WHERE version = ?", version)
    return np.frombuffer(state.blob(str(blob))[-4 * SIZE :], "<f4")


def recomputed(
    state: State, update_log: UpdateLog, number: int, base: "np.ndarray[tuple[int], np.dtype[np.float32]]"
) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
    """Return base + sum of n_i d_i / sum of n_i, in float64 in the order of the clients' names, rounded once."""
    total, samples = np.zeros(SIZE, np.float64), 0
    for client, digest in state.ask("SELECT client_id, digest FROM updates WHERE round = ? ORDER BY client_id", number):
        offered = update_log.offered[number, str(client), str(digest)]
        total += offered.samples * offered.values.astype(np.float64)
        samples += offered.samples
    return (base + total / samples).astype(np.float32)
