"""The promises of a store (`fedring.server.state.sql.store`), for each database in IMPLEMENTATIONS."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Select
from tests.store_implementations import IMPLEMENTATIONS, Implementation
from tests.unit.rows import a_job, a_model, a_round, an_update

from fedring.server.state.failures import StorageError
from fedring.server.state.rows import (
    KEEP_EVENTS,
    NOT_APPROVED,
    Acceptance,
    CommandRow,
    EvaluationRow,
    EventRow,
    JobRow,
    LastAccepted,
    PacketSpec,
    Pruned,
    RoundRow,
    TokenRow,
)
from fedring.server.state.sql import sealed
from fedring.server.state.sql.store import Store


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> Implementation:
    chosen: Implementation = request.param
    return chosen


@pytest.fixture
def store(implementation: Implementation, tmp_path: Path) -> Iterator[Store]:
    store = implementation(tmp_path, KEEP_EVENTS)
    yield store
    store.close()


class TestStore:
    def test_jobs_run_in_the_order_in_which_they_were_created(self, store: Store) -> None:
        first, second = a_job(store), a_job(store)
        assert (first.job_id, second.job_id) == (1, 2)
        assert store.jobs.queued()[0] == first
        store.jobs.set_state(1, "running")
        assert store.jobs.queued() == [second]
        assert store.jobs.running() == [replace(first, state="running")]
        store.jobs.set_state(1, "failed", "too_few_clients")
        assert store.jobs.get(1) == replace(first, state="failed", reason="too_few_clients")
        assert store.jobs.get(7) is None
        assert [job.job_id for job in store.jobs.newest()] == [2, 1]

    def test_a_job_with_the_same_idempotency_key_is_created_once(self, store: Store) -> None:
        first = a_job(store, key="once")
        assert a_job(store, rounds=9, key="once") == first
        assert a_job(store, key="twice").job_id != first.job_id

    def test_a_round_is_open_until_it_ends(self, store: Store) -> None:
        job = a_job(store)
        opened = a_round(store, job)
        assert store.rounds.unended() == [opened]
        ended = replace(opened, phase="abandoned", reason="stopped", selected=("b", "a"), ended_at=5.0, stats={"x": 1})
        store.rounds.replace(ended)
        assert store.rounds.unended() == []
        assert store.rounds.get(opened.round) == ended
        other = a_round(store, a_job(store))
        assert [row.round for row in store.rounds.newest()] == [other.round, opened.round]
        assert store.rounds.newest(10, job.job_id) == [ended]
        assert store.rounds.newest(10, below=other.round) == [ended]
        assert store.rounds.newest(10, other.job_id, other.round) == []
        assert (store.rounds.ended_of(job.job_id), store.rounds.ended_of(other.job_id)) == (1, 0)

    def test_an_update_is_accepted_once_and_listed_in_client_order(self, store: Store) -> None:
        number = a_round(store, a_job(store)).round
        rows = [an_update(number, name) for name in ("bob", "Zoe", "alice")]
        assert store.updates.accept(rows) == [Acceptance.NEW] * 3
        assert store.updates.of_round(number) == [rows[1], rows[2], rows[0]]
        assert store.updates.of_round(number + 1) == []
        assert store.updates.counts() == {"Zoe": 1, "alice": 1, "bob": 1}

    def test_a_retry_of_an_accepted_update_changes_nothing(self, store: Store) -> None:
        number = a_round(store, a_job(store)).round
        row = an_update(number, "bob")
        store.updates.accept([row])
        again = [replace(row, norm=7.0), an_update(number, "bob", "ef"), an_update(number, "eve")]
        assert store.updates.accept(again) == [Acceptance.ALREADY, Acceptance.OTHER, Acceptance.NEW]
        same_payload = replace(row, name="blake3-" + "ef" * 32)  # its header says something else
        assert store.updates.accept([same_payload]) == [Acceptance.OTHER]
        assert store.updates.of_round(number)[0] == row

    def test_of_two_updates_of_one_client_in_one_batch_the_first_is_accepted(self, store: Store) -> None:
        number = a_round(store, a_job(store)).round
        rows = [an_update(number, "bob", digest) for digest in ("ab", "ab", "ef")]
        assert store.updates.accept(rows) == [Acceptance.NEW, Acceptance.ALREADY, Acceptance.OTHER]
        assert len(store.updates.of_round(number)) == 1

    def test_an_update_of_an_unknown_round_is_refused_with_its_whole_batch(self, store: Store) -> None:
        number = a_round(store, a_job(store)).round
        with pytest.raises(StorageError):
            store.updates.accept([an_update(number, "bob"), an_update(99, "eve")])
        assert store.updates.of_round(number) == []

    def test_publishing_ends_the_round_and_counts_it_in_its_job(self, store: Store) -> None:
        job = a_job(store)
        opened = a_round(store, job)
        store.models.publish(a_model(1))
        delta = (PacketSpec("parameters", "delta", "packed", 0, 7),)
        model = replace(
            a_model(2, number=opened.round),
            base_version=1,
            base_digest="ff" * 32,
            delta_blob="ee" * 32,
            delta_packets=delta,
        )
        ended = replace(opened, phase="published", model_version=2, ended_at=8.0)
        store.models.publish(model, ended)
        assert store.models.get(2) == model
        assert [row.version for row in store.models.newest()] == [2, 1]
        assert store.rounds.get(opened.round) == ended
        done = store.jobs.get(job.job_id)
        assert done is not None
        assert done.rounds_done == 1

    def test_a_version_cannot_be_published_twice_and_the_attempt_changes_nothing(self, store: Store) -> None:
        opened = a_round(store, a_job(store))
        store.models.publish(a_model(1))
        with pytest.raises(StorageError):
            store.models.publish(a_model(1), replace(opened, ended_at=8.0))
        assert store.rounds.unended() == [opened]

    def test_the_sum_of_evaluations_leaves_the_servers_own_out(self, store: Store) -> None:
        assert store.evaluations.total(1) is None
        for client, correct in (("b", 5), ("a", 7), ("", 100)):
            store.evaluations.add(EvaluationRow(3, 1, client, correct, 10, 0.5))
        store.evaluations.add(EvaluationRow(3, 1, "b", 6, 10, 0.25))
        assert [row.client_id for row in store.evaluations.of_model(1)] == ["", "a", "b"]
        assert store.evaluations.total(1) == EvaluationRow(3, 1, "", 13, 20, 0.75)

    def test_only_the_newest_events_are_kept(self, implementation: Implementation, tmp_path: Path) -> None:
        store = implementation(tmp_path, 3)
        for number in range(1, 6):
            store.events.append([EventRow(number, 1.0, "client_lost", "a is gone")])
        assert [row.id for row in store.events.after(0)] == [3, 4, 5]
        store.events.append([EventRow(number, 1.0, "client_lost", "a is gone") for number in range(6, 12)])
        assert [row.id for row in store.events.after(0)] == [9, 10, 11]
        store.close()

    def test_events_are_read_after_an_id(self, store: Store) -> None:
        assert store.events.last_id() == 0
        rows = [EventRow(10 + i, 1.5, "round_started", f"round {i}", 1, i, "bob") for i in range(3)]
        store.events.append(rows[:1])
        store.events.append(rows[1:])
        store.events.append([])
        assert store.events.after(0) == rows
        assert store.events.after(10, 1) == [rows[1]]
        assert store.events.newest(2) == rows[1:]
        assert store.events.last_id() == 12

    def test_pruning_keeps_the_newest_and_every_open_round(self, store: Store) -> None:
        job = a_job(store)
        opened = a_round(store, job)
        old, new = a_round(store, job, ended=True), a_round(store, job, ended=True)
        for row, digest in ((opened, "aa"), (old, "bb"), (new, "cc")):
            store.updates.accept([an_update(row.round, "bob", digest)])
        for version in (1, 2, 3):
            made = a_model(version, residual=f"{16 + version:064x}", optimizer=f"{32 + version:064x}")
            others: dict[str, Any] = {"transforms_blob": f"{64 + version:064x}", "control_digest": "of c"}
            store.models.publish(replace(made, control_blob=f"{48 + version:064x}", **others))
            store.evaluations.add(EvaluationRow(new.round, version, "bob", 1, 2, 0.5))
        pruned = store.prune(keep_models=2, keep_update_rounds=1, keep_rounds=99)
        assert pruned.rows == 2
        state = [f"{base + version:064x}" for base in (16, 32, 48, 64) for version in (1, 2)]
        assert pruned.blobs == {"blake3-" + "bb" * 32, a_model(1).blob, *state}
        kept = {
            "blake3-" + "aa" * 32,
            "blake3-" + "cc" * 32,
            a_model(2).blob,
            a_model(3).blob,
            f"{19:064x}",
            f"{35:064x}",
            f"{51:064x}",
            f"{67:064x}",
        }
        assert [row.control_digest for row in store.models.newest()] == ["of c", ""]
        assert store.named_blobs() == kept
        assert [len(store.evaluations.of_model(version)) for version in (1, 2, 3)] == [0, 1, 1]
        assert store.prune(2, 1, 99).rows == 0

    def test_a_job_still_knows_how_many_rounds_ended_after_they_were_pruned(self, store: Store) -> None:
        job = a_job(store)
        for number in range(1, 8):
            row = store.rounds.create(RoundRow(0, job.job_id, number, "waiting", 0.0))
            store.rounds.replace(replace(row, phase="abandoned", ended_at=1.0))
        open_ = store.rounds.create(RoundRow(0, job.job_id, 8, "waiting", 0.0))
        store.prune(keep_models=1, keep_update_rounds=1, keep_rounds=3)
        assert [row.round for row in store.rounds.newest()] == [8, 7, 6, 5]
        assert store.rounds.ended_of(job.job_id) == 7
        store.prune(keep_models=1, keep_update_rounds=1, keep_rounds=3)
        assert store.rounds.create(RoundRow(0, job.job_id, 9, "waiting", 0.0)).round == open_.round + 1

    def test_a_job_that_runs_still_knows_its_rounds_after_many_of_another_job(self, store: Store) -> None:
        slow, fast = a_job(store), a_job(store)
        for job in (slow, fast):
            store.jobs.set_state(job.job_id, "running")

        def end(job: JobRow, number: int, **facts: Any) -> RoundRow:
            return store.rounds.create(RoundRow(0, job.job_id, number, "published", 0.0, ended_at=1.0, **facts))

        published = end(slow, 1, model_version=1)
        end(slow, 2)
        end(slow, 3, reason=NOT_APPROVED)
        for number in range(1, 9):
            end(fast, number)
        store.prune(keep_models=1, keep_update_rounds=1, keep_rounds=3)
        assert [row.job_round for row in store.rounds.newest(job_id=fast.job_id)] == [8, 7, 6]
        assert store.rounds.ended_of(slow.job_id) == 2
        assert store.rounds.last_published(slow.job_id) == published
        store.jobs.set_state(slow.job_id, "completed")
        store.prune(keep_models=1, keep_update_rounds=1, keep_rounds=3)
        assert store.rounds.newest(job_id=slow.job_id) == []

    def test_updates_of_rounds_abandoned_since_a_model_are_kept_for_transforms(self, store: Store) -> None:
        spec = {"transforms": [{"name": "feddyn", "args": {"alpha": 0.1}}]}
        stateful = store.jobs.create(replace(a_job(store), job_id=0, spec=spec, idempotency_key="stateful"))
        plain = a_job(store)
        for job in (stateful, plain):
            store.jobs.set_state(job.job_id, "running")
            for number, version in ((1, 0), (2, 7), (3, 0), (4, 0)):
                row = RoundRow(0, job.job_id, number, "published", 0.0, model_version=version, ended_at=1.0)
                store.updates.accept([an_update(store.rounds.create(row).round, f"client-{number}")])
        names = ["client-3", "client-4"]
        for job in (stateful, plain):
            assert [row.client_id for row in store.updates.uncounted(job.job_id)] == names
        for _ in range(9):
            a_round(store, plain, ended=True)
        store.prune(keep_models=1, keep_update_rounds=1, keep_rounds=99)
        assert [row.client_id for row in store.updates.uncounted(stateful.job_id)] == names
        assert store.updates.uncounted(plain.job_id) == []
        store.jobs.set_state(stateful.job_id, "completed")
        store.prune(keep_models=1, keep_update_rounds=1, keep_rounds=99)
        assert store.updates.uncounted(stateful.job_id) == []

    def test_only_jobs_with_updates_of_abandoned_rounds_are_read_to_prune(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        jobs, read, rows_of = [a_job(store) for _ in range(3)], list[str](), sealed.rows_of

        def noting(connection: Connection, query: Select[Any], kind: type[Any], *others: Any) -> list[Any]:
            found = rows_of(connection, query, kind, *others)
            read.extend(row.name for row in found if isinstance(row, JobRow))
            return found

        def end(job: JobRow, version: int) -> None:
            row = store.rounds.create(RoundRow(0, job.job_id, 1, "training", 0.0))
            store.updates.accept([an_update(row.round, "a")])
            ended = replace(row, ended_at=1.0, model_version=version)
            if version:
                store.models.publish(a_model(version, number=row.round), ended)
            else:
                store.rounds.replace(ended)

        for job in jobs:
            store.jobs.set_state(job.job_id, "running")
            end(job, job.job_id)
        monkeypatch.setattr(sealed, "rows_of", noting)
        store.prune(keep_models=9, keep_update_rounds=1, keep_rounds=99)
        assert read == []
        end(jobs[1], 0)
        read.clear()
        store.prune(keep_models=9, keep_update_rounds=1, keep_rounds=99)
        assert read == [jobs[1].name]

    def test_the_model_that_an_open_round_starts_from_is_kept(self, store: Store) -> None:
        for version in (1, 2, 3):
            store.models.publish(a_model(version))
        job = a_job(store)
        row = store.rounds.create(RoundRow(0, job.job_id, 1, "waiting", 0.0, base_version=1))
        store.prune(keep_models=1, keep_update_rounds=1, keep_rounds=1)
        assert [model.version for model in store.models.newest()] == [3, 1]
        store.rounds.replace(replace(row, phase="abandoned", ended_at=1.0))
        store.prune(keep_models=1, keep_update_rounds=1, keep_rounds=1)
        assert [model.version for model in store.models.newest()] == [3]

    def test_a_version_of_a_model_is_never_used_twice(self, store: Store) -> None:
        assert store.models.next_version() == 1
        for version in (1, 2, 3):
            store.models.publish(a_model(version))
        store.models.drop([2, 3])
        assert store.models.next_version() == 4
        store.models.drop([1])
        assert (store.models.newest(), store.models.next_version()) == ([], 4)

    def test_the_time_left_is_saved_only_for_the_phase_that_the_round_is_in(self, store: Store) -> None:
        row = store.rounds.create(RoundRow(0, a_job(store).job_id, 1, "waiting", 0.0))
        store.rounds.replace(replace(row, phase="training"))
        store.rounds.save_seconds_left(row.round, "waiting", 5.0)
        assert store.rounds.newest()[0].seconds_left is None
        store.rounds.save_seconds_left(row.round, "training", 7.0)
        assert store.rounds.newest()[0].seconds_left == 7.0

    def test_an_update_that_was_dropped_can_be_accepted_again(self, store: Store) -> None:
        row = a_round(store, a_job(store))
        store.updates.accept([an_update(row.round, "a"), an_update(row.round, "b")])
        dropped = store.updates.drop(row.round, ["a"])
        assert (dropped.rows, [update.client_id for update in store.updates.of_round(row.round)]) == (1, ["b"])
        assert store.updates.accept([an_update(row.round, "a")]) == [Acceptance.NEW]

    def test_updates_that_were_pruned_still_count(self, store: Store) -> None:
        job = a_job(store)
        for names in (("ann", "bob"), ("bob",), ("bob", "cleo"), ("bob",)):
            round_ = a_round(store, job, ended=True)
            store.updates.accept([an_update(round_.round, name) for name in names])
            store.prune(keep_models=1, keep_update_rounds=1, keep_rounds=99)
        assert store.updates.of_round(1) == []
        assert store.updates.counts() == {"ann": 1, "bob": 4, "cleo": 1}

    def test_an_answered_command_is_forgotten_no_later_than_its_answer(self, store: Store) -> None:
        job = a_job(store)
        store.jobs.set_state(job.job_id, "running")
        first, second = (a_round(store, job, ended=True).round for _ in range(2))

        def commanded() -> list[str]:
            return [row.client_id for row in store.commands.of_running_jobs()]

        rows = [CommandRow(job.job_id, name, first, 1, 0, 1, 9.0, [], b"command") for name in ("ann", "bob", "cleo")]
        store.commands.give(job.job_id, rows, ())
        answers = [an_update(first, "ann"), an_update(first, "bob"), an_update(second, "cleo")]
        store.updates.accept(answers)
        store.updates.forget_client("ann")
        assert commanded() == ["bob", "cleo"]
        store.prune(keep_models=1, keep_update_rounds=1, keep_rounds=9)
        assert commanded() == ["cleo"]  # her update has answered another command
        store.commands.give(job.job_id, [], ())
        assert commanded() == []

    def test_pruning_never_removes_the_newest_model(self, store: Store) -> None:
        store.models.publish(a_model(1))
        store.prune(0, 0, 0)
        assert store.models.newest() == [a_model(1)]

    def test_a_blob_that_another_row_names_is_not_released(self, store: Store) -> None:
        job = a_job(store)
        for _ in range(2):
            store.updates.accept([an_update(a_round(store, job, ended=True).round, "bob")])
        pruned = store.prune(1, 1, 99)
        assert (pruned.rows, pruned.blobs) == (1, frozenset())

    def test_open_rounds_of_jobs_that_do_not_run_are_abandoned(self, store: Store) -> None:
        running, stopped = a_job(store), a_job(store)
        store.jobs.set_state(running.job_id, "running")
        orphan, kept = a_round(store, stopped), a_round(store, running)
        store.rounds.end_orphans()
        assert store.rounds.unended() == [kept]
        ended = store.rounds.get(orphan.round)
        assert ended is not None
        assert (ended.phase, ended.reason, ended.ended_at is None) == ("abandoned", "job_ended", False)

    def test_a_token_is_revoked_once(self, store: Store) -> None:
        rows = [TokenRow(name, "ab" * 32, "client", name, at) for name, at in (("b", 1.0), ("a", 2.0))]
        for row in rows[::-1]:
            store.tokens.add(row)
        assert store.tokens.all() == rows
        store.tokens.revoke("b", 5.0)
        store.tokens.revoke("b", 6.0)
        store.tokens.revoke("nobody", 7.0)
        assert store.tokens.all() == [replace(rows[0], revoked_at=5.0), rows[1]]

    def test_a_probe_changes_nothing(self, store: Store) -> None:
        before = (store.run_id, store.epoch, a_job(store))
        store.probe()
        assert (store.run_id, store.epoch, *store.jobs.newest()) == before

    def test_a_batch_without_updates_is_accepted(self, store: Store) -> None:
        assert store.updates.accept([]) == []


class TestClients:
    """What a store knows of clients' updates beyond those that it keeps."""

    def test_the_newest_accepted_update_of_each_client_stays_known(self, store: Store) -> None:
        job = a_job(store)
        first, second, third = (a_round(store, job, ended=True).round for _ in range(3))
        store.updates.accept([an_update(first, "ann", "aa"), an_update(first, "bob", "bb")])
        assert store.updates.last_accepted() == {
            "ann": LastAccepted(0, first, "blake3-" + "aa" * 32),
            "bob": LastAccepted(0, first, "blake3-" + "bb" * 32),
        }
        store.updates.accept([an_update(second, "bob", "cc"), an_update(third, "eve", "dd")])
        before = {
            "ann": LastAccepted(0, first, "blake3-" + "aa" * 32),
            "bob": LastAccepted(0, second, "blake3-" + "cc" * 32),
            "eve": LastAccepted(0, third, "blake3-" + "dd" * 32),
        }
        assert store.updates.last_accepted() == before
        store.prune(keep_models=1, keep_update_rounds=1, keep_rounds=99)
        assert [store.updates.of_round(number) for number in (first, second)] == [[], []]
        assert store.updates.last_accepted() == before
        store.prune(keep_models=1, keep_update_rounds=0, keep_rounds=99)
        assert store.updates.last_accepted() == before

    def test_the_name_of_an_accepted_update_outlives_its_row(self, store: Store) -> None:
        job = a_job(store)
        first, second = (a_round(store, job, ended=True).round for _ in range(2))
        assert store.updates.accepted_name(first, "ann") == ""
        for number, digest in ((first, "ac"), (second, "ae")):
            store.updates.accept([an_update(number, "ann", digest)])
        names = "blake3-" + "ca" * 32, "blake3-" + "ea" * 32
        assert [store.updates.accepted_name(number, "ann") for number in (first, second)] == list(names)
        store.prune(keep_models=1, keep_update_rounds=1, keep_rounds=99)
        assert [store.updates.accepted_name(number, "ann") for number in (first, second)] == list(names)
        store.prune(keep_models=1, keep_update_rounds=0, keep_rounds=99)
        # Of the updates that were pruned, only the newest is known.
        assert [store.updates.accepted_name(number, "ann") for number in (first, second)] == ["", names[1]]
        assert [store.updates.accepted_name(number, "bob") for number in (first, second, 99)] == ["", "", ""]

    @pytest.mark.parametrize("pruned", [False, True])
    def test_an_update_of_a_later_epoch_is_newer(self, store: Store, pruned: bool) -> None:
        job = a_job(store)
        first, second, third = (a_round(store, job, ended=True).round for _ in range(3))
        store.updates.accept([an_update(second, "ann", "ab", epoch=1)])
        store.updates.accept([an_update(first, "bob", "ab", epoch=8), an_update(second, "bob", "cd", epoch=8)])
        if pruned:
            store.prune(keep_models=1, keep_update_rounds=0, keep_rounds=99)
        store.updates.accept([an_update(third, "ann", "ef", epoch=2)])
        if pruned:
            store.prune(keep_models=1, keep_update_rounds=0, keep_rounds=99)
        assert store.updates.last_accepted() == {
            "ann": LastAccepted(2, third, "blake3-" + "fe" * 32),
            "bob": LastAccepted(8, second, "blake3-" + "dc" * 32),
        }

    def test_an_update_of_an_earlier_epoch_is_not_newer_even_if_it_is_accepted_later(self, store: Store) -> None:
        job = a_job(store)
        first, second = (a_round(store, job, ended=True).round for _ in range(2))
        store.updates.accept([an_update(first, "ann", "ab", epoch=5)])
        store.prune(keep_models=1, keep_update_rounds=0, keep_rounds=99)
        store.updates.accept([an_update(second, "ann", "cd", epoch=4)])
        wanted = {"ann": LastAccepted(5, first, "blake3-" + "ba" * 32)}
        assert store.updates.last_accepted() == wanted
        store.prune(keep_models=1, keep_update_rounds=0, keep_rounds=99)
        assert store.updates.last_accepted() == wanted

    def test_an_update_that_was_dropped_is_no_longer_the_newest(self, store: Store) -> None:
        job = a_job(store)
        first, second = a_round(store, job, ended=True).round, a_round(store, job).round
        store.updates.accept([an_update(first, "ann", "ab"), an_update(second, "ann", "cd")])
        store.updates.drop(second, ["ann"])
        assert store.updates.last_accepted() == {"ann": LastAccepted(0, first, "blake3-" + "ba" * 32)}
        assert store.updates.accepted_name(second, "ann") == ""

    def test_forgetting_a_client_leaves_only_its_updates_in_open_rounds(self, store: Store) -> None:
        job = a_job(store)
        old, ended, opened = *(a_round(store, job, ended=True).round for _ in range(2)), a_round(store, job).round
        for number, digest in ((old, "ab"), (ended, "cd"), (opened, "ef")):
            store.updates.accept([an_update(number, "ann", digest), an_update(number, "bob", digest[0] * 2)])
        store.models.publish(a_model(1))
        for client in ("ann", "bob", ""):
            store.evaluations.add(EvaluationRow(ended, 1, client, 1, 2, 0.5))
        store.prune(keep_models=1, keep_update_rounds=1, keep_rounds=99)
        forgotten = store.updates.forget_client("ann")
        assert forgotten == Pruned(3, frozenset({"blake3-" + "cd" * 32}))
        assert [row.client_id for row in store.updates.of_round(ended)] == ["bob"]
        assert [row.client_id for row in store.updates.of_round(opened)] == ["ann", "bob"]
        assert [row.client_id for row in store.evaluations.of_model(1)] == ["", "bob"]
        assert store.updates.counts() == {"ann": 1, "bob": 3}
        assert [store.updates.accepted_name(number, "ann") for number in (old, ended)] == ["", ""]
        assert store.updates.last_accepted()["ann"] == LastAccepted(0, opened, "blake3-" + "fe" * 32)
        store.rounds.replace(replace(store.rounds.newest()[0], phase="published", ended_at=9.0))
        assert store.updates.forget_client("ann").rows == 1
        assert "ann" not in store.updates.last_accepted()
        assert "ann" not in store.updates.counts()
        assert store.updates.forget_client("ann") == store.updates.forget_client("nobody") == Pruned(0, frozenset())
        assert store.updates.last_accepted().keys() == {"bob"}

    def test_forgetting_a_client_does_not_release_a_blob_that_another_row_names(self, store: Store) -> None:
        number = a_round(store, a_job(store), ended=True).round
        store.updates.accept([an_update(number, "ann"), an_update(number, "bob")])
        assert store.updates.forget_client("ann").blobs == frozenset()
        assert store.updates.forget_client("bob").blobs == {"blake3-" + "ab" * 32}

    def test_a_new_run_has_epoch_0(self, store: Store) -> None:
        assert store.epoch == 0
