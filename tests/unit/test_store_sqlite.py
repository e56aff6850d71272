"""The store in SQLite: its file, its migrations, and what a state of an earlier version becomes."""

import re
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, select, text
from tests.unit.rows import a_job, a_model, a_round, an_update

from fedring.server.state.database import StoreError, open_database
from fedring.server.state.failures import StorageError
from fedring.server.state.interfaces import Acceptance
from fedring.server.state.rows import EvaluationRow, JobRow, LastAccepted
from fedring.server.state.store import SqlStore
from fedring.server.state.tables import meta


def test_facts_and_the_run_id_outlive_the_process(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'facts.sqlite'}"
    first = SqlStore(url)
    run_id, job = first.run_id, a_job(first)
    first.close()
    second = SqlStore(url)
    assert (second.run_id, second.job(1)) == (run_id, job)
    second.close()
    other = SqlStore("sqlite://")
    assert other.run_id != run_id
    other.close()


def test_the_database_is_strict_and_syncs_every_commit(tmp_path: Path) -> None:
    engine = open_database(f"sqlite:///{tmp_path / 'facts.sqlite'}")
    with engine.begin() as connection:
        names = ("journal_mode", "synchronous", "secure_delete", "page_size")
        values = [connection.execute(text(f"PRAGMA {name}")).scalar() for name in names]
        strict = connection.execute(text("SELECT min(strict) FROM pragma_table_list WHERE name NOT LIKE 'sqlite%'"))
        assert (values, strict.scalar()) == (["wal", 2, 0, 16384], 1)
    engine.dispose()


def test_neither_accepting_nor_pruning_reads_whole_tables(tmp_path: Path) -> None:
    store = SqlStore(f"sqlite:///{tmp_path / 'facts.sqlite'}")
    done: list[tuple[str, Any]] = []

    def remember(*args: Any) -> None:
        done.append((args[2], args[3]))

    event.listen(Engine, "after_cursor_execute", remember)
    row = a_round(store, a_job(store))
    store.accept_updates([an_update(row.round, "a"), an_update(row.round, "b")])
    store.prune(keep_models=1, keep_update_rounds=1, keep_rounds=99)
    event.remove(Engine, "after_cursor_execute", remember)
    engine = open_database(f"sqlite:///{tmp_path / 'facts.sqlite'}")
    plans = {}
    with engine.begin() as connection:
        for statement, values in done:
            if re.match(r"SELECT updates\.round|DELETE FROM updates", statement):
                steps = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", values).all()
                plans[statement[:6]] = [step.detail for step in steps]
    assert plans.keys() == {"SELECT", "DELETE"}
    scans = {step for plan in plans.values() for step in plan if step.startswith("SCAN")}
    assert scans <= {"SCAN updates USING COVERING INDEX sqlite_autoindex_updates_1", "SCAN rounds"}, plans
    assert "SEARCH rounds USING INTEGER PRIMARY KEY (rowid=?)" in plans["DELETE"]  # apart from the newest few
    store.close()
    engine.dispose()


def test_a_newer_state_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "facts.sqlite"
    SqlStore(f"sqlite:///{file}").close()
    connection = sqlite3.connect(file)
    connection.execute("PRAGMA user_version = 14")
    connection.close()
    with pytest.raises(StoreError, match="newer version: schema 14, this program knows 13") as caught:
        SqlStore(f"sqlite:///{file}")
    assert caught.value.reason == "newer_state"


def test_an_older_state_is_migrated_after_a_backup(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'facts.sqlite'}"
    open_database(url, ()).dispose()

    def rename(connection: Connection) -> None:
        connection.execute(meta.update().values(value="migrated"))

    for _ in range(2):
        engine = open_database(url, (rename,))
        with engine.begin() as connection:
            assert connection.execute(select(meta.c.value)).scalar() == "migrated"
            assert connection.execute(text("PRAGMA user_version")).scalar() == 2
        engine.dispose()
    copy = open_database(f"sqlite:///{tmp_path / 'facts.sqlite.v1.bak'}", ())
    with copy.begin() as connection:
        assert connection.execute(select(meta.c.value)).scalar() != "migrated"
    copy.dispose()


def test_a_state_of_schema_version_1_gets_a_table_of_tokens(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'facts.sqlite'}"
    engine = open_database(url, ())
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE tokens"))  # schema version 1 did not have it
    engine.dispose()
    store = SqlStore(url)
    assert store.tokens() == []
    store.close()


def test_a_failed_migration_changes_nothing(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'facts.sqlite'}"
    open_database(url, ()).dispose()

    def fail(connection: Connection) -> None:
        connection.execute(meta.update().values(value="half"))
        raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError):
        open_database(url, (fail,))
    store = SqlStore(url)
    assert store.run_id != "half"
    store.close()


def test_a_file_that_is_not_a_database_is_reported_as_corrupt(tmp_path: Path) -> None:
    (tmp_path / "facts.sqlite").write_bytes(b"not a database" * 100)
    with pytest.raises(StorageError) as caught:
        SqlStore(f"sqlite:///{tmp_path / 'facts.sqlite'}")
    assert caught.value.reason == "corrupt"


def test_a_backup_is_a_complete_store(tmp_path: Path) -> None:
    store = SqlStore(f"sqlite:///{tmp_path / 'facts.sqlite'}")
    job = a_job(store)
    store.backup(tmp_path / "copy.sqlite")
    a_job(store)
    copy = SqlStore(f"sqlite:///{tmp_path / 'copy.sqlite'}")
    assert (copy.run_id, copy.jobs()) == (store.run_id, [job])
    with pytest.raises(StoreError, match="no_backup"):
        store.backup(tmp_path / "copy.sqlite")
    copy.close()
    store.close()


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
    """Write the database of a program of that schema version."""
    script = OLD.format(seconds_left=", seconds_left REAL" if version > 3 else "", **DIGESTS)
    with closing(sqlite3.connect(file)) as connection:
        connection.executescript(script + (TOKENS if version > 1 else "") + (CLIENTS if version > 2 else ""))
        connection.execute(f"PRAGMA user_version = {version}")


@pytest.mark.parametrize("version", [1, 2, 3, 4])
def test_a_state_of_protocol_1_keeps_the_names_of_its_updates_and_models(tmp_path: Path, version: int) -> None:
    database_of(version, tmp_path / "facts.sqlite")
    secrets = set[str]()
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
            7: (DIGESTS["third"], ""),  # its base is not kept any more
        }
        assert (store.rounds()[0].seconds_left, store.tokens()) == (None, [])
        assert [row.settings for row in store.rounds()] == [{}, {}]
        secrets.add(store.secret)
        store.close()
    assert [len(secret) for secret in secrets] == [32]
    with closing(sqlite3.connect(tmp_path / f"facts.sqlite.v{version}.bak")) as copy:
        assert copy.execute("PRAGMA user_version").fetchone() == (version,)


def test_a_state_of_protocol_1_can_be_continued(tmp_path: Path) -> None:
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


def test_evaluations_of_older_states_have_an_accuracy_over_all_samples(tmp_path: Path) -> None:
    database_of(4, tmp_path / "facts.sqlite")
    with closing(sqlite3.connect(tmp_path / "facts.sqlite")) as connection:
        connection.execute("INSERT INTO evaluations VALUES (2, 'ann', 1, 3, 4, 2.0), (2, 'bob', 1, 1, 4, 6.0)")
        connection.commit()
    store = SqlStore(f"sqlite:///{tmp_path / 'facts.sqlite'}")
    summed = store.evaluation_sum(2)
    assert summed is not None
    assert (summed.accuracy, summed.loss, summed.metrics) == (0.5, 1.0, {})
    store.add_evaluation(EvaluationRow(1, 2, "ann", 0, 4, 2.0, classified=0, metrics={"f1": 0.5}))
    store.add_evaluation(EvaluationRow(1, 2, "bob", 0, 12, 6.0, classified=0, metrics={"f1": 0.9}))
    summed = store.evaluation_sum(2)
    assert summed is not None
    assert (summed.accuracy, summed.loss) == (None, 0.5)
    assert summed.metrics == {"f1": pytest.approx(0.8)}
    store.close()


def test_a_state_from_before_jobs_said_what_they_start_from_learns_whose_its_models_are(tmp_path: Path) -> None:
    file = tmp_path / "facts.sqlite"
    store = SqlStore(f"sqlite:///{file}")
    job = a_job(store)
    opened = a_round(store, job)
    store.publish(a_model(1))
    store.publish(a_model(2, number=opened.round), replace(opened, phase="published", ended_at=9.0))
    for client, correct in (("ann", 3), ("bob", 6)):
        store.add_evaluation(EvaluationRow(opened.round, 2, client, correct, 10, 5.0))
    store.add_evaluation(EvaluationRow(opened.round, 2, "", 10, 10, 0.0))  # the server's own
    store.close()
    with closing(sqlite3.connect(file)) as connection:
        for table, columns in (
            ("jobs", ("start_version", "residual_after", "residual_epoch")),
            ("models", ("job_id", "metrics", "frozen_digest")),
        ):
            for column in columns:
                connection.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
        connection.execute("PRAGMA user_version = 5")
    for _ in range(2):
        store = SqlStore(f"sqlite:///{file}")
        found = [(row.version, row.job_id, row.metrics) for row in store.models()]
        assert found == [(2, job.job_id, {"eval/accuracy": 0.45, "eval/loss": 0.5}), (1, 0, {})]
        row = store.job(job.job_id)
        assert row is not None
        assert (row.start_version, row.residual_after, row.residual_epoch) == (0, 0, 0)
        store.close()
    assert (tmp_path / "facts.sqlite.v5.bak").exists()


def test_the_models_of_older_states_get_the_metrics_of_their_rounds(tmp_path: Path) -> None:
    file = tmp_path / "facts.sqlite"
    store = SqlStore(f"sqlite:///{file}")
    job = store.create_job(JobRow(0, "digits", {"best_by": "max eval/f1"}, 9, 1.5))
    metrics = [{"eval/f1": 0.9, "eval/accuracy": 0.5}, {"eval/f1": 0.1, "eval/accuracy": 0.7}]
    for version, known in enumerate(metrics, start=1):
        opened = a_round(store, job)
        ended = replace(opened, phase="published", ended_at=9.0, stats={"metrics": known})
        store.publish(replace(a_model(version, number=opened.round), job_id=job.job_id), ended)
        store.add_evaluation(EvaluationRow(opened.round, version, "ann", 5, 10, 5.0))
    store.publish(replace(a_model(3, number=99), job_id=job.job_id))  # its round is not kept, nor is an evaluation
    store.close()
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("ALTER TABLE models DROP COLUMN metrics")
        for column, value in (("accuracy", 0.25), ("loss", 3.0)):
            connection.execute(f"ALTER TABLE models ADD COLUMN {column} REAL")
            connection.execute(f"UPDATE models SET {column} = ?", (value,))
        connection.execute("PRAGMA user_version = 7")
        connection.commit()
    for _ in range(2):
        store = SqlStore(f"sqlite:///{file}")
        assert {row.version: row.metrics for row in store.models()} == {
            1: {**metrics[0], "eval/loss": 3.0},
            2: {**metrics[1], "eval/loss": 3.0},
            3: {"server/accuracy": 0.25, "server/loss": 3.0},
        }
        assert store.best_versions() == {1}
        store.close()
    assert (tmp_path / "facts.sqlite.v7.bak").exists()
    with closing(sqlite3.connect(file)) as old, closing(sqlite3.connect(tmp_path / "new.sqlite")) as new:
        SqlStore(f"sqlite:///{tmp_path / 'new.sqlite'}").close()
        columns = [{row[1:4] for row in each.execute("PRAGMA table_info(models)")} for each in (old, new)]
    assert columns[0] == columns[1]
