"""The store in SQLite: its file, its tables, and the digests of its rows."""

import random
import re
import sqlite3
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, event, text
from tests.damage import ask
from tests.unit.rows import a_job, a_model, a_round, an_update

from fedring.server.state.failures import StorageError, StorageFailed, StoreError
from fedring.server.state.identity import open_state
from fedring.server.state.rows import (
    ChargeRow,
    CommandRow,
    EvaluationRow,
    JobRow,
    TokenRow,
)
from fedring.server.state.sql import database
from fedring.server.state.sql.database import SCHEMA, open_database
from fedring.server.state.sql.schema import SecureMessageRow, SecureRoundRow
from fedring.server.state.sql.store import Store
from fedring.server.state.sql.tables import METADATA, ROW_DIGEST

SEED, FLIPS = 1, 100


def test_facts_and_the_run_id_outlive_the_process(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'facts.sqlite'}"
    first = Store(url)
    run_id, job = first.run_id, a_job(first)
    first.close()
    second = Store(url)
    assert (second.run_id, second.jobs.get(1)) == (run_id, job)
    second.close()
    other = Store("sqlite://")
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
    store = Store(f"sqlite:///{tmp_path / 'facts.sqlite'}")
    done: list[tuple[str, Any]] = []

    def remember(*args: Any) -> None:
        done.append((args[2], args[3]))

    event.listen(Engine, "after_cursor_execute", remember)
    row = a_round(store, a_job(store))
    store.updates.accept([an_update(row.round, "a"), an_update(row.round, "b")])
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
    indexes = {
        f"SCAN updates USING COVERING INDEX {name}" for name in ("sqlite_autoindex_updates_1", "one_of_each_client")
    }
    assert scans <= {*indexes, "SCAN rounds"}, plans
    assert "SEARCH rounds USING INTEGER PRIMARY KEY (rowid=?)" in plans["DELETE"]  # apart from the newest few
    store.close()
    engine.dispose()


@pytest.mark.parametrize(
    ("schema", "reason", "words"),
    [
        (SCHEMA + 1, "newer_state", f"newer version: schema {SCHEMA + 1}, this program knows {SCHEMA}"),
        (16, "older_state", "written by a version that was not released \\(schema 16\\)"),
        (14, "older_state", "written by fedring 0.1.0 or before \\(schema 14\\)"),
        (1, "older_state", "go on with fedring 0.1.0"),
    ],
)
def test_the_tables_of_another_version_are_refused(schema: int, reason: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "facts.sqlite"
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("CREATE TABLE jobs (job_id INTEGER)")
        connection.execute(f"PRAGMA user_version = {schema}")
    before = file.read_bytes()
    with pytest.raises(StoreError, match=words) as caught:
        open_state(tmp_path)
    assert caught.value.reason == reason
    assert file.read_bytes() == before
    with pytest.raises(StoreError, match=words):
        Store(f"sqlite:///{file}")
    with closing(sqlite3.connect(file)) as connection:
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("jobs",)]


@pytest.mark.parametrize("accept_older", [False, True])
def test_the_log_of_a_killed_older_server_is_not_moved_into_its_database(accept_older: bool, tmp_path: Path) -> None:
    file, log = tmp_path / "facts.sqlite", tmp_path / "facts.sqlite-wal"
    killed = sqlite3.connect(file)
    killed.execute("PRAGMA journal_mode = WAL")
    killed.execute("CREATE TABLE jobs (job_id INTEGER)")
    killed.execute("PRAGMA user_version = 13")
    before = file.read_bytes(), log.read_bytes()
    with pytest.raises(StoreError, match=r"older_state: .* fedring 0\.1\.0"):
        open_state(tmp_path, accept_older=accept_older)
    assert (file.read_bytes(), log.read_bytes()) == before
    assert before[1], "the version lies in the log"
    killed.close()


def test_a_file_that_is_not_a_database_is_reported_as_corrupt(tmp_path: Path) -> None:
    (tmp_path / "facts.sqlite").write_bytes(b"not a database" * 100)
    with pytest.raises(StorageError) as caught:
        Store(f"sqlite:///{tmp_path / 'facts.sqlite'}")
    assert caught.value.reason == "corrupt"


def test_a_backup_is_a_complete_store(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'facts.sqlite'}")
    job = a_job(store)
    store.backup(tmp_path / "copy.sqlite")
    a_job(store)
    copy = Store(f"sqlite:///{tmp_path / 'copy.sqlite'}")
    assert (copy.run_id, copy.jobs.newest()) == (store.run_id, [job])
    with pytest.raises(StoreError, match="no_backup"):
        store.backup(tmp_path / "copy.sqlite")
    copy.close()
    store.close()


UNCOVERED = {("updates", "payload")}


def filled(folder: Path) -> None:
    """Make a database with a row, or more, in each table that has digests."""
    store = Store(f"sqlite:///{folder / 'facts.sqlite'}")
    job = a_job(store, key="once")
    done, opened = a_round(store, job), a_round(store, job)
    store.models.publish(a_model(1))
    store.updates.accept([an_update(done.round, "ann"), replace(an_update(done.round, "bob"), payload=b"bytes")])
    ended = replace(done, phase="published", model_version=2, ended_at=9.0, selected=("ann",), stats={"a": [1, 2.5]})
    store.models.publish(a_model(2, number=done.round), ended, ChargeRow(done.round, job.job_id, 1.5, 0.25, 8.0))
    store.evaluations.add(EvaluationRow(done.round, 2, "ann", 3, 4, 2.0, 4, {"f1": 0.5}))
    store.tokens.add(TokenRow("t", "ab", "operator", "ann", 1.0))
    store.prune(keep_models=2, keep_update_rounds=0, keep_rounds=9)
    store.updates.accept([an_update(opened.round, "ann")])
    store.kept.put(SecureRoundRow(opened.round, 2, [{"members": ["ann"]}]), "start")
    store.kept.add(SecureMessageRow(opened.round, "ann", "keys", b"1"), "message")
    command = CommandRow(job.job_id, "ann", opened.round, 2, 1, 2, 9.0, [0, 1], b"command")
    store.commands.give(job.job_id, [command], ())
    store.close()


def changed(value: object) -> object:
    """Return a value that differs little, as after a flipped bit; of JSON, one that is JSON, too."""
    match value:
        case None:
            return 1
        case str() if value[:1] in ("[", "{") and len(value) > 2:
            return value.replace("1", "3") if "1" in value else value.replace("0", "2", 1).replace("a", "b", 1)
        case str():
            return value[:-1] + chr(ord(value[-1]) ^ 1) if value and value[:1] not in ("[", "{") else None
        case bytes():
            return bytes([value[0] ^ 1, *value[1:]]) if value else b"1"
        case int() | float():
            return value + 1
    raise TypeError(value)


def columns_with_digest() -> list[tuple[str, str]]:
    tables = [table for table in METADATA.sorted_tables if ROW_DIGEST in table.c]
    return [(table.name, column.name) for table in tables for column in table.c]


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("full")
    filled(folder)
    Store(f"sqlite:///{folder / 'facts.sqlite'}").close()
    return folder


@pytest.mark.parametrize(("table", "column"), columns_with_digest())
def test_a_value_that_is_not_what_was_written_is_noticed_at_the_start(
    table: str, column: str, full: Path, tmp_path: Path
) -> None:
    file = tmp_path / "facts.sqlite"
    file.write_bytes((full / "facts.sqlite").read_bytes())
    ((value, row),) = ask(tmp_path, f"SELECT {column}, max(rowid) FROM {table}")
    with closing(sqlite3.connect(file)) as connection:  # without foreign keys
        new = changed(value)
        connection.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", ("x" if new is None else new, row))
        connection.commit()
    if (table, column) in UNCOVERED:
        Store(f"sqlite:///{file}").close()
        return
    with pytest.raises(StoreError, match=rf"the table {table} of facts\.sqlite .*: restore a backup") as caught:
        Store(f"sqlite:///{file}")
    assert caught.value.reason == "corrupt"


def test_a_damaged_row_is_named_refused_when_it_is_read_and_never_given_a_new_digest(tmp_path: Path) -> None:
    filled(tmp_path)
    store = Store(f"sqlite:///{tmp_path / 'facts.sqlite'}")
    ask(tmp_path, "UPDATE jobs SET rounds = rounds + 1")
    ask(tmp_path, "UPDATE updates SET num_samples = 63 WHERE client_id = 'ann'")
    with pytest.raises(StoreError, match=r"the row of round 2, client_id 'ann' in the table updates of facts\.sqlite"):
        store.updates.of_round(2)
    with pytest.raises(StoreError, match="corrupt"):  # not "already accepted", of which nothing is certain
        store.updates.accept([an_update(2, "ann")])
    for attempt in (partial(store.jobs.set_state, 1, "failed"), partial(store.jobs.get, 1)):
        with pytest.raises(StoreError, match="the row of job_id 1 in the table jobs"):
            attempt()
    store.close()


def test_damage_that_comes_while_a_server_runs_becomes_no_answer(tmp_path: Path) -> None:
    filled(tmp_path)
    store = Store(f"sqlite:///{tmp_path / 'facts.sqlite'}")
    ask(tmp_path, "UPDATE updates SET name = 'another' WHERE client_id = 'ann'")
    ask(tmp_path, "UPDATE clients SET last_name = 'another' WHERE client_id = 'bob'")
    ask(tmp_path, "UPDATE rounds SET job_round = 7 WHERE ended_at IS NOT NULL")
    ask(tmp_path, "UPDATE models SET bytes = 98 WHERE version = 2")
    reads = (
        partial(store.updates.accepted_name, 2, "ann"),
        partial(store.updates.accepted_name, 1, "bob"),
        store.updates.last_accepted,
        partial(store.rounds.ended_of, 1),
        store.models.next_version,
    )
    for read in reads:
        with pytest.raises(StoreError, match=r"corrupt: .* is not what was written"):
            read()
    store.close()


def test_pruning_notes_nothing_of_a_damaged_update_and_dropping_nothing_of_a_damaged_number(tmp_path: Path) -> None:
    filled(tmp_path)
    store = Store(f"sqlite:///{tmp_path / 'facts.sqlite'}")
    (opened,) = store.rounds.unended()
    assert opened is not None
    store.rounds.replace(replace(opened, ended_at=10.0))
    store.models.drop([2])
    before = ask(tmp_path, "SELECT * FROM clients"), ask(tmp_path, "SELECT count(*) FROM updates")
    ask(tmp_path, "UPDATE updates SET name = 'another'")
    with pytest.raises(StoreError, match="the row of round 2, client_id 'ann' in the table updates"):
        store.prune(keep_models=2, keep_update_rounds=0, keep_rounds=9)
    assert (ask(tmp_path, "SELECT * FROM clients"), ask(tmp_path, "SELECT count(*) FROM updates")) == before
    ask(tmp_path, "UPDATE meta SET value = '1' WHERE name = 'highest_dropped_model'")
    with pytest.raises(StoreError, match="the row of name 'highest_dropped_model' in the table meta"):
        store.models.drop([1])
    store.close()


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("jobs.state", "CAST(state AS BLOB)"),  # one bit tells text from bytes
        ("secure_messages.body", "CAST(body AS TEXT)"),
        ("models.parameters", "'many'"),
        ("models.parameters", "NULL"),
        ("charges.next_clip", "NULL"),
        ("updates.name", "7"),
    ],
)
def test_a_value_of_another_type_is_a_damaged_row(column: str, value: str, tmp_path: Path) -> None:
    filled(tmp_path)
    table, name = column.split(".")
    loose = "replace(replace(replace(sql, 'STRICT', ''), 'NOT NULL', ''), 'TEXT', '')"
    file = tmp_path / "facts.sqlite"
    with closing(sqlite3.connect(file)) as connection:  # as a flip does it, which asks no table what it allows
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute(f"UPDATE sqlite_master SET sql = {loose} WHERE sql LIKE '%STRICT%'")
        connection.commit()
    ask(tmp_path, f"UPDATE {table} SET {name} = {value}")
    with pytest.raises(StoreError, match=f"in the table {table} of .* is not what was written"):
        Store(f"sqlite:///{file}")


@pytest.mark.parametrize("column", ["updates.payload", "events.text", "rounds.stats"])
def test_a_column_that_has_lost_its_name_is_noticed_at_the_start(column: str, full: Path, tmp_path: Path) -> None:
    (tmp_path / "facts.sqlite").write_bytes((full / "facts.sqlite").read_bytes())
    table, name = column.split(".")
    ask(tmp_path, f"ALTER TABLE {table} RENAME COLUMN {name} TO other")
    with pytest.raises(
        StoreError, match=rf"database is damaged \(no such column: {column}\): restore a backup"
    ) as caught:
        Store(f"sqlite:///{tmp_path / 'facts.sqlite'}")
    assert caught.value.reason == "corrupt"


def test_a_database_that_another_program_holds_is_tried_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "_BUSY_MILLISECONDS", 0)
    url = f"sqlite:///{tmp_path / 'facts.sqlite'}"
    store = Store(url)
    with closing(sqlite3.connect(tmp_path / "facts.sqlite", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StorageFailed, match="another program uses facts"):
            store.probe()
        with pytest.raises(StorageFailed, match="another program uses facts"):
            Store(url)
    store.probe()
    store.close()


def test_a_row_that_is_replaced_must_be_there(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'facts.sqlite'}")
    row = a_round(store, a_job(store))
    ask(tmp_path, "DELETE FROM rounds")
    with pytest.raises(StoreError, match=r"the row of round 1 in the table rounds of facts\.sqlite is missing"):
        store.models.publish(a_model(1), replace(row, ended_at=9.0))
    assert store.models.newest() == [], "nothing of the transaction is kept"
    store.close()


def test_no_flipped_bit_becomes_another_fact(full: Path, tmp_path: Path) -> None:
    file, rng = tmp_path / "facts.sqlite", random.Random(SEED)
    data = (full / "facts.sqlite").read_bytes()
    used = [at for at, byte in enumerate(data) if byte]
    facts = facts_in(full / "facts.sqlite")
    refused = 0
    for _ in range(FLIPS):
        at, bit = rng.choice(used), rng.randrange(8)
        file.write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
        try:
            assert facts_in(file) == facts, (SEED, at, bit)
        except StoreError:
            refused += 1
        for path in tmp_path.iterdir():
            path.unlink()
    assert refused > FLIPS // 2


def facts_in(file: Path) -> list[Any]:
    """Return what a server that starts on a database reads there, by all ways that lead to a row."""
    store = Store(f"sqlite:///{file}")
    with closing(store):
        one = [
            store.rounds.get(1),
            store.rounds.get(2),
            store.models.get(1),
            store.models.get(2),
            store.jobs.get(1),
            store.jobs.of_key("once"),
        ]
        found = [
            store.rounds.unended(),
            store.rounds.last_published(1),
            store.jobs.queued(),
            store.jobs.running(),
        ]
        names = [
            store.updates.accepted_name(1, "ann"),
            store.updates.accepted_name(2, "ann"),
            store.updates.last_accepted(),
        ]
        lists = [
            store.jobs.newest(),
            store.rounds.newest(),
            store.models.newest(),
            store.rounds.charges(),
            store.tokens.all(),
            store.evaluations.of_model(2),
        ]
        figures = [store.updates.counts(), store.models.next_version(), store.rounds.ended_of(1), store.named_blobs()]
        updates = [replace(row, payload=b"") for row in store.updates.of_round(2)]
        return [
            store.run_id,
            store.secret,
            store.epoch,
            *one,
            *found,
            *names,
            *lists,
            *figures,
            updates,
            store.kept.of_round(SecureRoundRow, 2),
            store.kept.of_round(SecureMessageRow, 2),
        ]


def test_numbers_keep_their_digests_whatever_the_database_makes_of_them(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'facts.sqlite'}")
    spec: dict[Any, Any] = {"a": -0.0, "b": 1, 2: "\ud800"}
    job = store.jobs.create(JobRow(0, "digits", spec, True, 2))
    number = a_round(store, job).round
    rows = [replace(an_update(number, name), norm=norm, train_seconds=3) for name, norm in (("a", -0.0), ("b", 1e300))]
    store.updates.accept(rows)
    store.close()
    store = Store(f"sqlite:///{tmp_path / 'facts.sqlite'}")
    assert store.updates.of_round(number) == rows
    assert store.jobs.get(1) == replace(job, spec={"a": -0.0, "b": 1, "2": "\ud800"})
    store.close()
