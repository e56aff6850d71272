"""What the store knows of clients' updates beyond those that it keeps; and what of those that it kept before."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.test_store import a_job, a_model, a_round, an_update

from fedring.server.state.interfaces import Acceptance, Pruned
from fedring.server.state.rows import EvaluationRow, LastAccepted
from fedring.server.state.store import SqlStore


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SqlStore]:
    store = SqlStore("sqlite://" if request.param == "memory" else f"sqlite:///{tmp_path / 'facts.sqlite'}")
    yield store
    store.close()


class TestKnown:
    def test_of_a_client_the_newest_accepted_update_stays_known(self, store: SqlStore) -> None:
        job = a_job(store)
        first, second, third = (a_round(store, job, ended=True).round for _ in range(3))
        store.accept_updates([an_update(first, "ann", "aa"), an_update(first, "bob", "bb")])
        assert store.last_accepted() == {
            "ann": LastAccepted(0, first, "blake3-" + "aa" * 32),
            "bob": LastAccepted(0, first, "blake3-" + "bb" * 32),
        }
        store.accept_updates([an_update(second, "bob", "cc"), an_update(third, "eve", "dd")])
        before = {
            "ann": LastAccepted(0, first, "blake3-" + "aa" * 32),
            "bob": LastAccepted(0, second, "blake3-" + "cc" * 32),
            "eve": LastAccepted(0, third, "blake3-" + "dd" * 32),
        }
        assert store.last_accepted() == before
        store.prune(keep_models=1, keep_update_rounds=1, keep_rounds=99)
        assert [store.updates_of(number) for number in (first, second)] == [[], []]
        assert store.last_accepted() == before
        store.prune(keep_models=1, keep_update_rounds=0, keep_rounds=99)
        assert store.last_accepted() == before

    def test_the_name_of_an_accepted_update_outlives_its_row(self, store: SqlStore) -> None:
        job = a_job(store)
        first, second = (a_round(store, job, ended=True).round for _ in range(2))
        assert store.accepted_name(first, "ann") == ""
        for number, digest in ((first, "ac"), (second, "ae")):
            store.accept_updates([an_update(number, "ann", digest)])
        names = "blake3-" + "ca" * 32, "blake3-" + "ea" * 32
        assert [store.accepted_name(number, "ann") for number in (first, second)] == list(names)
        store.prune(keep_models=1, keep_update_rounds=1, keep_rounds=99)
        assert [store.accepted_name(number, "ann") for number in (first, second)] == list(names)
        store.prune(keep_models=1, keep_update_rounds=0, keep_rounds=99)
        # Of those that are not kept, the newest alone is known.
        assert [store.accepted_name(number, "ann") for number in (first, second)] == ["", names[1]]
        assert [store.accepted_name(number, "bob") for number in (first, second, 99)] == ["", "", ""]

    @pytest.mark.parametrize("pruned", [False, True])
    def test_the_newest_update_is_that_of_the_newest_epoch(self, store: SqlStore, pruned: bool) -> None:
        job = a_job(store)
        first, second, third = (a_round(store, job, ended=True).round for _ in range(3))
        store.accept_updates([an_update(second, "ann", "ab", epoch=1)])
        store.accept_updates([an_update(first, "bob", "ab", epoch=8), an_update(second, "bob", "cd", epoch=8)])
        if pruned:
            store.prune(keep_models=1, keep_update_rounds=0, keep_rounds=99)
        store.accept_updates([an_update(third, "ann", "ef", epoch=2)])
        if pruned:
            store.prune(keep_models=1, keep_update_rounds=0, keep_rounds=99)
        assert store.last_accepted() == {
            "ann": LastAccepted(2, third, "blake3-" + "fe" * 32),
            "bob": LastAccepted(8, second, "blake3-" + "dc" * 32),
        }

    def test_an_update_of_an_earlier_epoch_is_no_newer_whenever_it_comes(self, store: SqlStore) -> None:
        job = a_job(store)
        first, second = (a_round(store, job, ended=True).round for _ in range(2))
        store.accept_updates([an_update(first, "ann", "ab", epoch=5)])
        store.prune(keep_models=1, keep_update_rounds=0, keep_rounds=99)
        store.accept_updates([an_update(second, "ann", "cd", epoch=4)])
        wanted = {"ann": LastAccepted(5, first, "blake3-" + "ba" * 32)}
        assert store.last_accepted() == wanted
        store.prune(keep_models=1, keep_update_rounds=0, keep_rounds=99)
        assert store.last_accepted() == wanted

    def test_an_update_that_was_forgotten_as_damaged_is_not_the_newest_any_more(self, store: SqlStore) -> None:
        job = a_job(store)
        first, second = a_round(store, job, ended=True).round, a_round(store, job).round
        store.accept_updates([an_update(first, "ann", "ab"), an_update(second, "ann", "cd")])
        store.drop_updates(second, ["ann"])
        assert store.last_accepted() == {"ann": LastAccepted(0, first, "blake3-" + "ba" * 32)}
        assert store.accepted_name(second, "ann") == ""

    def test_of_a_client_that_is_forgotten_nothing_is_left_but_in_open_rounds(self, store: SqlStore) -> None:
        job = a_job(store)
        old, ended, opened = *(a_round(store, job, ended=True).round for _ in range(2)), a_round(store, job).round
        for number, digest in ((old, "ab"), (ended, "cd"), (opened, "ef")):
            store.accept_updates([an_update(number, "ann", digest), an_update(number, "bob", digest[0] * 2)])
        store.publish(a_model(1))
        for client in ("ann", "bob", ""):
            store.add_evaluation(EvaluationRow(ended, 1, client, 1, 2, 0.5))
        store.prune(keep_models=1, keep_update_rounds=1, keep_rounds=99)
        forgotten = store.forget_client("ann")
        assert forgotten == Pruned(3, frozenset({"blake3-" + "cd" * 32}))
        assert [row.client_id for row in store.updates_of(ended)] == ["bob"]
        assert [row.client_id for row in store.updates_of(opened)] == ["ann", "bob"]
        assert [row.client_id for row in store.evaluations(1)] == ["", "bob"]
        assert store.update_counts() == {"ann": 1, "bob": 3}
        assert [store.accepted_name(number, "ann") for number in (old, ended)] == ["", ""]
        assert store.last_accepted()["ann"] == LastAccepted(0, opened, "blake3-" + "fe" * 32)
        store.update_round(replace(store.rounds()[0], phase="published", ended_at=9.0))
        assert store.forget_client("ann").rows == 1
        assert "ann" not in store.last_accepted()
        assert "ann" not in store.update_counts()
        assert store.forget_client("ann") == store.forget_client("nobody") == Pruned(0, frozenset())
        assert store.last_accepted().keys() == {"bob"}

    def test_a_blob_of_a_forgotten_client_that_another_row_names_is_not_let_go(self, store: SqlStore) -> None:
        number = a_round(store, a_job(store), ended=True).round
        store.accept_updates([an_update(number, "ann"), an_update(number, "bob")])
        assert store.forget_client("ann").blobs == frozenset()
        assert store.forget_client("bob").blobs == {"blake3-" + "ab" * 32}

    def test_a_new_run_is_of_no_epoch(self, store: SqlStore) -> None:
        assert store.epoch == 0


OLD = """
CREATE TABLE meta (name TEXT NOT NULL, value TEXT NOT NULL, PRIMARY KEY (name)) STRICT;
CREATE TABLE jobs (
    job_id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL, spec TEXT NOT NULL, rounds INTEGER NOT NULL,
    created_at REAL NOT NULL, state TEXT NOT NULL, reason TEXT NOT NULL, rounds_done INTEGER NOT NULL,
    idempotency_key TEXT, UNIQUE (idempotency_key)) STRICT;
CREATE TABLE models (
    version INTEGER NOT NULL, round INTEGER NOT NULL, digest TEXT NOT NULL, blob TEXT NOT NULL,
    schema_hash TEXT NOT NULL, parameters INTEGER NOT NULL, bytes INTEGER NOT NULL, created_at REAL NOT NULL,
    base_version INTEGER NOT NULL, delta_blob TEXT NOT NULL, delta_packets TEXT NOT NULL, residual_blob TEXT NOT NULL,
    optimizer_blob TEXT NOT NULL, PRIMARY KEY (version)) STRICT;
CREATE TABLE evaluations (
    version INTEGER NOT NULL, client_id TEXT NOT NULL, round INTEGER NOT NULL, correct INTEGER NOT NULL,
    total INTEGER NOT NULL, loss_sum REAL NOT NULL, PRIMARY KEY (version, client_id)) STRICT;
CREATE TABLE events (
    id INTEGER NOT NULL, at REAL NOT NULL, kind TEXT NOT NULL, text TEXT NOT NULL, job_id INTEGER NOT NULL,
    round INTEGER NOT NULL, client_id TEXT NOT NULL, PRIMARY KEY (id)) STRICT;
CREATE TABLE rounds (
    round INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, job_id INTEGER NOT NULL, job_round INTEGER NOT NULL,
    phase TEXT NOT NULL, started_at REAL NOT NULL, base_version INTEGER NOT NULL, model_version INTEGER NOT NULL,
    reason TEXT NOT NULL, selected TEXT NOT NULL, ended_at REAL, stats TEXT NOT NULL{seconds_left},
    FOREIGN KEY(job_id) REFERENCES jobs (job_id)) STRICT;
CREATE INDEX rounds_by_job ON rounds (job_id);
CREATE TABLE updates (
    round INTEGER NOT NULL, client_id TEXT NOT NULL, digest TEXT NOT NULL, packets TEXT NOT NULL,
    num_samples INTEGER NOT NULL, total_bytes INTEGER NOT NULL, train_seconds REAL NOT NULL, norm REAL NOT NULL,
    accepted_at REAL NOT NULL, metrics TEXT NOT NULL, blob TEXT NOT NULL, payload BLOB NOT NULL,
    PRIMARY KEY (round, client_id), FOREIGN KEY(round) REFERENCES rounds (round)) STRICT;
INSERT INTO meta VALUES ('run_id', 'the run'), ('state_id', 'the state');
INSERT INTO jobs VALUES (1, 'digits', '{{"lr": 0.5}}', 3, 1.5, 'running', '', 1, NULL);
INSERT INTO rounds (
    round, job_id, job_round, phase, started_at, base_version, model_version, reason, selected, ended_at, stats)
    VALUES (1, 1, 1, 'published', 2.5, 1, 2, '', '["ann","bob"]', 9.0, '{{}}'),
    (2, 1, 2, 'training', 3.5, 2, 0, '', '["ann","bob"]', NULL, '{{}}');
INSERT INTO updates VALUES (1, 'ann', '{ann}', '[]', 5, 9, 0.5, 2.5, 3.5, '{{}}', '{ann}', x''),
    (1, 'bob', '{bob}', '[]', 5, 9, 0.5, 2.5, 3.5, '{{}}', '', x'01'),
    (2, 'ann', '{again}', '[]', 5, 9, 0.5, 2.5, 3.5, '{{}}', '', x'02');
INSERT INTO models VALUES (1, 0, '{first}', '{first}', 'cd', 10, 99, 4.5, 0, '', '[]', '', ''),
    (2, 1, '{second}', '{second}', 'cd', 10, 99, 4.5, 1, '{ann}', '[]', '', ''),
    (7, 1, '{third}', '{third}', 'cd', 10, 99, 4.5, 6, '{ann}', '[]', '', '');
"""
TOKENS = """
CREATE TABLE tokens (
    token_id TEXT NOT NULL, digest TEXT NOT NULL, role TEXT NOT NULL, name TEXT NOT NULL, created_at REAL NOT NULL,
    expires_at REAL, revoked_at REAL, PRIMARY KEY (token_id)) STRICT;
"""
CLIENTS = """
CREATE TABLE clients (client_id TEXT NOT NULL, pruned_updates INTEGER NOT NULL, PRIMARY KEY (client_id)) STRICT;
INSERT INTO clients VALUES ('bob', 3), ('eve', 2);
"""
DIGESTS = {name: letters * 32 for name, letters in zip(("ann", "bob", "again"), ("a1", "b0", "a2"), strict=True)}
DIGESTS |= {name: letters * 32 for name, letters in zip(("first", "second", "third"), ("01", "02", "07"), strict=True)}


def database_of(version: int, file: Path) -> None:
    """What a program of that schema version has left: the tables of version 4, but for what was added on the way."""
    script = OLD.format(seconds_left=", seconds_left REAL" if version > 3 else "", **DIGESTS)
    with closing(sqlite3.connect(file)) as connection:
        connection.executescript(script + (TOKENS if version > 1 else "") + (CLIENTS if version > 2 else ""))
        connection.execute(f"PRAGMA user_version = {version}")


@pytest.mark.parametrize("version", [1, 2, 3, 4])
def test_a_state_of_protocol_1_knows_its_updates_and_models_by_their_names_of_before(
    tmp_path: Path, version: int
) -> None:
    database_of(version, tmp_path / "facts.sqlite")
    for _ in range(2):
        store = SqlStore(f"sqlite:///{tmp_path / 'facts.sqlite'}")
        assert (store.run_id, store.epoch) == ("the run", 0)
        rows = [*store.updates_of(1), *store.updates_of(2)]
        assert [(row.client_id, row.name, row.epoch) for row in rows] == [
            ("ann", DIGESTS["ann"], 0),
            ("bob", DIGESTS["bob"], 0),
            ("ann", DIGESTS["again"], 0),
        ]
        assert [row.digest for row in rows] == [row.name for row in rows]
        assert store.accepted_name(1, "ann") == DIGESTS["ann"]
        assert store.last_accepted() == {
            "ann": LastAccepted(0, 2, DIGESTS["again"]),
            "bob": LastAccepted(0, 1, DIGESTS["bob"]),
        }
        assert store.update_counts() == {"ann": 2, "bob": 4, "eve": 2} if version > 2 else {"ann": 2, "bob": 1}
        bases = {model.version: (model.digest, model.base_digest) for model in store.models()}
        assert bases == {
            1: (DIGESTS["first"], ""),
            2: (DIGESTS["second"], DIGESTS["first"]),
            7: (DIGESTS["third"], ""),  # whose base is not kept any more
        }
        assert (store.rounds()[0].seconds_left, store.tokens()) == (None, [])
        store.close()
    with closing(sqlite3.connect(tmp_path / f"facts.sqlite.v{version}.bak")) as copy:
        assert copy.execute("PRAGMA user_version").fetchone() == (version,)


def test_a_state_of_protocol_1_goes_on(tmp_path: Path) -> None:
    database_of(4, tmp_path / "facts.sqlite")
    store = SqlStore(f"sqlite:///{tmp_path / 'facts.sqlite'}")
    rows = [an_update(2, "ann"), an_update(2, "bob")]
    assert store.accept_updates(rows) == [Acceptance.OTHER, Acceptance.NEW]
    (opened,) = [row for row in store.rounds() if row.ended_at is None]
    store.publish(replace(a_model(8, number=2), base_version=2), replace(opened, phase="published", ended_at=9.5))
    store.prune(keep_models=1, keep_update_rounds=0, keep_rounds=99)
    assert store.last_accepted() == {
        "ann": LastAccepted(0, 2, DIGESTS["again"]),
        "bob": LastAccepted(0, 2, rows[1].name),
    }
    assert store.update_counts() == {"ann": 2, "bob": 5, "eve": 2}
    store.close()
