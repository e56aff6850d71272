"""The store: one suite for every database that it supports."""

import re
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, select, text

from fedring.server.state import store as stores
from fedring.server.state.blobs import StorageError
from fedring.server.state.database import StoreError, open_database
from fedring.server.state.interfaces import Acceptance
from fedring.server.state.rows import EvaluationRow, EventRow, JobRow, ModelRow, PacketSpec, RoundRow, UpdateRow
from fedring.server.state.store import SqlStore
from fedring.server.state.tables import meta


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SqlStore]:
    store = SqlStore("sqlite://" if request.param == "memory" else f"sqlite:///{tmp_path / 'facts.sqlite'}")
    yield store
    store.close()


def a_job(store: SqlStore, rounds: int = 3, key: str | None = None) -> JobRow:
    return store.create_job(JobRow(0, "digits", {"lr": 0.5}, rounds, 1.5, idempotency_key=key))


def a_round(store: SqlStore, job: JobRow, *, ended: bool = False) -> RoundRow:
    return store.create_round(RoundRow(0, job.job_id, 1, "training", 2.5, ended_at=9.0 if ended else None))


def an_update(number: int, client: str, digest: str = "ab", *, epoch: int = 0, name: str = "") -> UpdateRow:
    """An update; its payload's digest, and its name if none is given, come from two letters."""
    packets = (PacketSpec("parameters", "delta", "uniform", 0, 90), PacketSpec("buffers", "delta", "fp64", 90, 10))
    payload, metrics = f"blake3-{digest * 32}", {"loss": 0.25}
    name = name or f"blake3-{digest[::-1] * 32}"
    return UpdateRow(number, client, payload, name, packets, 64, 100, 1.5, 2.5, 3.5, metrics, blob=payload, epoch=epoch)


def a_model(version: int, *, number: int = 0, residual: str = "", optimizer: str = "") -> ModelRow:
    blob = f"{version:064x}"
    return ModelRow(
        version, number, blob, blob, "cd" * 32, 10, 99, 4.5, residual_blob=residual, optimizer_blob=optimizer
    )


class TestStore:
    def test_jobs_run_in_the_order_they_came(self, store: SqlStore) -> None:
        first, second = a_job(store), a_job(store)
        assert (first.job_id, second.job_id) == (1, 2)
        assert store.next_queued_job() == first
        store.set_job_state(1, "running")
        assert store.next_queued_job() == second
        assert store.running_job() == replace(first, state="running")
        store.set_job_state(1, "failed", "too_few_clients")
        assert store.job(1) == replace(first, state="failed", reason="too_few_clients")
        assert store.job(7) is None
        assert [job.job_id for job in store.jobs()] == [2, 1]

    def test_the_same_idempotency_key_is_the_same_job(self, store: SqlStore) -> None:
        first = a_job(store, key="once")
        assert a_job(store, rounds=9, key="once") == first
        assert a_job(store, key="twice").job_id != first.job_id

    def test_a_round_is_open_until_it_has_ended(self, store: SqlStore) -> None:
        job = a_job(store)
        opened = a_round(store, job)
        assert store.open_round() == opened
        ended = replace(opened, phase="abandoned", reason="stopped", selected=("b", "a"), ended_at=5.0, stats={"x": 1})
        store.update_round(ended)
        assert store.open_round() is None
        assert store.round(opened.round) == ended
        other = a_round(store, a_job(store))
        assert [row.round for row in store.rounds()] == [other.round, opened.round]
        assert store.rounds(10, job.job_id) == [ended]
        assert store.rounds(10, below=other.round) == [ended]
        assert store.rounds(10, other.job_id, other.round) == []
        assert (store.job_rounds_ended(job.job_id), store.job_rounds_ended(other.job_id)) == (1, 0)

    def test_an_update_is_accepted_once_and_listed_in_client_order(self, store: SqlStore) -> None:
        number = a_round(store, a_job(store)).round
        rows = [an_update(number, name) for name in ("bob", "Zoe", "alice")]
        assert store.accept_updates(rows) == [Acceptance.NEW] * 3
        assert store.updates_of(number) == [rows[1], rows[2], rows[0]]
        assert store.updates_of(number + 1) == []
        assert store.update_counts() == {"Zoe": 1, "alice": 1, "bob": 1}

    def test_a_retry_of_an_accepted_update_changes_nothing(self, store: SqlStore) -> None:
        number = a_round(store, a_job(store)).round
        row = an_update(number, "bob")
        store.accept_updates([row])
        again = [replace(row, norm=7.0), an_update(number, "bob", "ef"), an_update(number, "eve")]
        assert store.accept_updates(again) == [Acceptance.ALREADY, Acceptance.OTHER, Acceptance.NEW]
        same_payload = replace(row, name="blake3-" + "ef" * 32)  # whose header says something else
        assert store.accept_updates([same_payload]) == [Acceptance.OTHER]
        assert store.updates_of(number)[0] == row

    def test_two_updates_of_one_client_in_one_batch_count_once(self, store: SqlStore) -> None:
        number = a_round(store, a_job(store)).round
        rows = [an_update(number, "bob", digest) for digest in ("ab", "ab", "ef")]
        assert store.accept_updates(rows) == [Acceptance.NEW, Acceptance.ALREADY, Acceptance.OTHER]
        assert len(store.updates_of(number)) == 1

    def test_an_update_of_no_round_is_refused_with_its_whole_batch(self, store: SqlStore) -> None:
        number = a_round(store, a_job(store)).round
        with pytest.raises(StoreError):
            store.accept_updates([an_update(number, "bob"), an_update(99, "eve")])
        assert store.updates_of(number) == []

    def test_publishing_ends_the_round_and_counts_it_at_once(self, store: SqlStore) -> None:
        job = a_job(store)
        opened = a_round(store, job)
        store.publish(a_model(1))
        delta = (PacketSpec("parameters", "delta", "packed", 0, 7),)
        model = replace(
            a_model(2, number=opened.round),
            base_version=1,
            base_digest="ff" * 32,
            delta_blob="ee" * 32,
            delta_packets=delta,
        )
        ended = replace(opened, phase="published", model_version=2, ended_at=8.0)
        store.publish(model, ended)
        assert store.model(2) == model
        assert [row.version for row in store.models()] == [2, 1]
        assert store.round(opened.round) == ended
        done = store.job(job.job_id)
        assert done is not None
        assert done.rounds_done == 1

    def test_a_version_is_published_once_and_a_failure_leaves_nothing(self, store: SqlStore) -> None:
        opened = a_round(store, a_job(store))
        store.publish(a_model(1))
        with pytest.raises(StoreError):
            store.publish(a_model(1), replace(opened, ended_at=8.0))
        assert store.open_round() == opened

    def test_evaluations_add_up_without_the_servers_own(self, store: SqlStore) -> None:
        assert store.evaluation_sum(1) is None
        for client, correct in (("b", 5), ("a", 7), ("", 100)):
            store.add_evaluation(EvaluationRow(3, 1, client, correct, 10, 0.5))
        store.add_evaluation(EvaluationRow(3, 1, "b", 6, 10, 0.25))
        assert [row.client_id for row in store.evaluations(1)] == ["", "a", "b"]
        assert store.evaluation_sum(1) == EvaluationRow(3, 1, "", 13, 20, 0.75)

    def test_only_the_newest_events_are_kept(self, store: SqlStore, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(stores, "KEEP_EVENTS", 3)
        for number in range(1, 6):
            store.append_events([EventRow(number, 1.0, "client_lost", "a is gone")])
        assert [row.id for row in store.events_after(0)] == [3, 4, 5]
        store.append_events([EventRow(number, 1.0, "client_lost", "a is gone") for number in range(6, 12)])
        assert [row.id for row in store.events_after(0)] == [9, 10, 11]

    def test_events_are_read_from_where_one_left_off(self, store: SqlStore) -> None:
        rows = [EventRow(10 + i, 1.5, "round_started", f"round {i}", 1, i, "bob") for i in range(3)]
        store.append_events(rows[:1])
        store.append_events(rows[1:])
        store.append_events([])
        assert store.events_after(0) == rows
        assert store.events_after(10, 1) == [rows[1]]
        assert store.last_events(2) == rows[1:]

    def test_retention_keeps_the_newest_and_every_open_round(self, store: SqlStore) -> None:
        job = a_job(store)
        opened = a_round(store, job)
        old, new = a_round(store, job, ended=True), a_round(store, job, ended=True)
        for row, digest in ((opened, "aa"), (old, "bb"), (new, "cc")):
            store.accept_updates([an_update(row.round, "bob", digest)])
        for version in (1, 2, 3):
            store.publish(a_model(version, residual=f"{16 + version:064x}", optimizer=f"{32 + version:064x}"))
            store.add_evaluation(EvaluationRow(new.round, version, "bob", 1, 2, 0.5))
        pruned = store.prune(keep_models=2, keep_update_rounds=1, keep_rounds=99)
        assert pruned.rows == 2
        state = [f"{base + version:064x}" for base in (16, 32) for version in (1, 2)]
        assert pruned.blobs == {"blake3-" + "bb" * 32, a_model(1).blob, *state}
        kept = {
            "blake3-" + "aa" * 32,
            "blake3-" + "cc" * 32,
            a_model(2).blob,
            a_model(3).blob,
            f"{19:064x}",
            f"{35:064x}",
        }
        assert store.named_blobs() == kept
        assert [len(store.evaluations(version)) for version in (1, 2, 3)] == [0, 1, 1]
        assert store.prune(2, 1, 99).rows == 0

    def test_of_old_rounds_only_the_newest_are_kept_and_their_job_still_knows_how_many_there_were(
        self, store: SqlStore
    ) -> None:
        job = a_job(store)
        for number in range(1, 8):
            row = store.create_round(RoundRow(0, job.job_id, number, "waiting", 0.0))
            store.update_round(replace(row, phase="abandoned", ended_at=1.0))
        open_ = store.create_round(RoundRow(0, job.job_id, 8, "waiting", 0.0))
        store.prune(keep_models=1, keep_update_rounds=1, keep_rounds=3)
        assert [row.round for row in store.rounds()] == [8, 7, 6, 5]
        assert store.job_rounds_ended(job.job_id) == 7
        store.prune(keep_models=1, keep_update_rounds=1, keep_rounds=3)
        assert store.create_round(RoundRow(0, job.job_id, 9, "waiting", 0.0)).round == open_.round + 1

    def test_the_model_that_an_open_round_starts_from_is_kept(self, store: SqlStore) -> None:
        for version in (1, 2, 3):
            store.publish(a_model(version))
        job = a_job(store)
        row = store.create_round(RoundRow(0, job.job_id, 1, "waiting", 0.0, base_version=1))
        store.prune(keep_models=1, keep_update_rounds=1, keep_rounds=1)
        assert [model.version for model in store.models()] == [3, 1]
        store.update_round(replace(row, phase="abandoned", ended_at=1.0))
        store.prune(keep_models=1, keep_update_rounds=1, keep_rounds=1)
        assert [model.version for model in store.models()] == [3]

    def test_a_number_of_a_model_is_never_used_twice(self, store: SqlStore) -> None:
        assert store.next_version() == 1
        for version in (1, 2, 3):
            store.publish(a_model(version))
        store.drop_models([2, 3])
        assert store.next_version() == 4
        store.drop_models([1])
        assert (store.models(), store.next_version()) == ([], 4)

    def test_the_time_that_is_left_is_noted_for_the_phase_that_it_was_left_in(self, store: SqlStore) -> None:
        row = store.create_round(RoundRow(0, a_job(store).job_id, 1, "waiting", 0.0))
        store.update_round(replace(row, phase="training"))
        store.save_seconds_left(row.round, "waiting", 5.0)
        assert store.rounds()[0].seconds_left is None
        store.save_seconds_left(row.round, "training", 7.0)
        assert store.rounds()[0].seconds_left == 7.0

    def test_updates_and_models_that_are_damaged_are_forgotten(self, store: SqlStore) -> None:
        row = a_round(store, a_job(store))
        store.accept_updates([an_update(row.round, "a"), an_update(row.round, "b")])
        dropped = store.drop_updates(row.round, ["a"])
        assert (dropped.rows, [update.client_id for update in store.updates_of(row.round)]) == (1, ["b"])
        assert store.accept_updates([an_update(row.round, "a")]) == [Acceptance.NEW]

    def test_updates_that_were_let_go_still_count(self, store: SqlStore) -> None:
        job = a_job(store)
        for names in (("ann", "bob"), ("bob",), ("bob", "cleo"), ("bob",)):
            round_ = a_round(store, job, ended=True)
            store.accept_updates([an_update(round_.round, name) for name in names])
            store.prune(keep_models=1, keep_update_rounds=1, keep_rounds=99)
        assert store.updates_of(1) == []
        assert store.update_counts() == {"ann": 1, "bob": 4, "cleo": 1}

    def test_retention_never_removes_the_newest_model(self, store: SqlStore) -> None:
        store.publish(a_model(1))
        store.prune(0, 0, 0)
        assert store.models() == [a_model(1)]

    def test_a_blob_that_another_row_names_is_not_let_go(self, store: SqlStore) -> None:
        job = a_job(store)
        for _ in range(2):
            store.accept_updates([an_update(a_round(store, job, ended=True).round, "bob")])
        pruned = store.prune(1, 1, 99)
        assert (pruned.rows, pruned.blobs) == (1, frozenset())


def test_facts_outlive_the_process_and_so_does_the_run(tmp_path: Path) -> None:
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


def test_the_database_syncs_fully_is_strict_and_writes_no_more_than_it_must(tmp_path: Path) -> None:
    engine = open_database(f"sqlite:///{tmp_path / 'facts.sqlite'}")
    with engine.begin() as connection:
        names = ("journal_mode", "synchronous", "secure_delete", "page_size")
        values = [connection.execute(text(f"PRAGMA {name}")).scalar() for name in names]
        strict = connection.execute(text("SELECT min(strict) FROM pragma_table_list WHERE name NOT LIKE 'sqlite%'"))
        assert (values, strict.scalar()) == (["wal", 2, 0, 16384], 1)
    engine.dispose()


def test_neither_accepting_nor_letting_go_reads_all_that_is_kept(tmp_path: Path) -> None:
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
    assert "SEARCH rounds USING INTEGER PRIMARY KEY (rowid=?)" in plans["DELETE"]  # besides the newest few
    store.close()
    engine.dispose()


def test_a_newer_state_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "facts.sqlite"
    SqlStore(f"sqlite:///{file}").close()
    connection = sqlite3.connect(file)
    connection.execute("PRAGMA user_version = 7")
    connection.close()
    with pytest.raises(StoreError, match="newer version: schema 7, this program knows 5") as caught:
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


def test_a_state_of_the_first_version_gets_a_table_of_tokens(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'facts.sqlite'}"
    engine = open_database(url, ())
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE tokens"))  # which the first version did not have
    engine.dispose()
    store = SqlStore(url)
    assert store.tokens() == []
    store.close()


def test_a_failed_migration_changes_nothing(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'facts.sqlite'}"
    open_database(url, ()).dispose()

    def fail(connection: Connection) -> None:
        connection.execute(meta.update().values(value="half"))
        raise RuntimeError("broken off")

    with pytest.raises(RuntimeError):
        open_database(url, (fail,))
    store = SqlStore(url)
    assert store.run_id != "half"
    store.close()


def test_a_file_that_is_no_database_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "facts.sqlite").write_bytes(b"not a database" * 100)
    with pytest.raises(StorageError) as caught:
        SqlStore(f"sqlite:///{tmp_path / 'facts.sqlite'}")
    assert caught.value.reason == "corrupt"


def test_a_backup_is_a_whole_store(tmp_path: Path) -> None:
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
