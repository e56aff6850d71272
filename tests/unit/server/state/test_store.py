"""The promises of a store, as `fedring.server.state.interfaces.Store` states them, for each implementation.

To check another implementation, add it to IMPLEMENTATIONS.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.store_implementations import IMPLEMENTATIONS, Implementation
from tests.unit.rows import a_job, a_model, a_round, an_update

from fedring.server.state.failures import StorageError
from fedring.server.state.interfaces import Acceptance, Pruned, Store
from fedring.server.state.rows import KEEP_EVENTS, EvaluationRow, EventRow, LastAccepted, PacketSpec, RoundRow, TokenRow


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
        assert store.next_queued_job() == first
        store.set_job_state(1, "running")
        assert store.next_queued_job() == second
        assert store.running_job() == replace(first, state="running")
        store.set_job_state(1, "failed", "too_few_clients")
        assert store.job(1) == replace(first, state="failed", reason="too_few_clients")
        assert store.job(7) is None
        assert [job.job_id for job in store.jobs()] == [2, 1]

    def test_a_job_with_the_same_idempotency_key_is_created_once(self, store: Store) -> None:
        first = a_job(store, key="once")
        assert a_job(store, rounds=9, key="once") == first
        assert a_job(store, key="twice").job_id != first.job_id

    def test_a_round_is_open_until_it_ends(self, store: Store) -> None:
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

    def test_an_update_is_accepted_once_and_listed_in_client_order(self, store: Store) -> None:
        number = a_round(store, a_job(store)).round
        rows = [an_update(number, name) for name in ("bob", "Zoe", "alice")]
        assert store.accept_updates(rows) == [Acceptance.NEW] * 3
        assert store.updates_of(number) == [rows[1], rows[2], rows[0]]
        assert store.updates_of(number + 1) == []
        assert store.update_counts() == {"Zoe": 1, "alice": 1, "bob": 1}

    def test_a_retry_of_an_accepted_update_changes_nothing(self, store: Store) -> None:
        number = a_round(store, a_job(store)).round
        row = an_update(number, "bob")
        store.accept_updates([row])
        again = [replace(row, norm=7.0), an_update(number, "bob", "ef"), an_update(number, "eve")]
        assert store.accept_updates(again) == [Acceptance.ALREADY, Acceptance.OTHER, Acceptance.NEW]
        same_payload = replace(row, name="blake3-" + "ef" * 32)  # its header says something else
        assert store.accept_updates([same_payload]) == [Acceptance.OTHER]
        assert store.updates_of(number)[0] == row

    def test_of_two_updates_of_one_client_in_one_batch_the_first_is_accepted(self, store: Store) -> None:
        number = a_round(store, a_job(store)).round
        rows = [an_update(number, "bob", digest) for digest in ("ab", "ab", "ef")]
        assert store.accept_updates(rows) == [Acceptance.NEW, Acceptance.ALREADY, Acceptance.OTHER]
        assert len(store.updates_of(number)) == 1

    def test_an_update_of_an_unknown_round_is_refused_with_its_whole_batch(self, store: Store) -> None:
        number = a_round(store, a_job(store)).round
        with pytest.raises(StorageError):
            store.accept_updates([an_update(number, "bob"), an_update(99, "eve")])
        assert store.updates_of(number) == []

    def test_publishing_ends_the_round_and_counts_it_in_its_job(self, store: Store) -> None:
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

    def test_a_version_cannot_be_published_twice_and_the_attempt_changes_nothing(self, store: Store) -> None:
        opened = a_round(store, a_job(store))
        store.publish(a_model(1))
        with pytest.raises(StorageError):
            store.publish(a_model(1), replace(opened, ended_at=8.0))
        assert store.open_round() == opened

    def test_the_sum_of_evaluations_leaves_the_servers_own_out(self, store: Store) -> None:
        assert store.evaluation_sum(1) is None
        for client, correct in (("b", 5), ("a", 7), ("", 100)):
            store.add_evaluation(EvaluationRow(3, 1, client, correct, 10, 0.5))
        store.add_evaluation(EvaluationRow(3, 1, "b", 6, 10, 0.25))
        assert [row.client_id for row in store.evaluations(1)] == ["", "a", "b"]
        assert store.evaluation_sum(1) == EvaluationRow(3, 1, "", 13, 20, 0.75)

    def test_only_the_newest_events_are_kept(self, implementation: Implementation, tmp_path: Path) -> None:
        store = implementation(tmp_path, 3)
        for number in range(1, 6):
            store.append_events([EventRow(number, 1.0, "client_lost", "a is gone")])
        assert [row.id for row in store.events_after(0)] == [3, 4, 5]
        store.append_events([EventRow(number, 1.0, "client_lost", "a is gone") for number in range(6, 12)])
        assert [row.id for row in store.events_after(0)] == [9, 10, 11]
        store.close()

    def test_events_are_read_after_an_id(self, store: Store) -> None:
        assert store.last_event_id() == 0
        rows = [EventRow(10 + i, 1.5, "round_started", f"round {i}", 1, i, "bob") for i in range(3)]
        store.append_events(rows[:1])
        store.append_events(rows[1:])
        store.append_events([])
        assert store.events_after(0) == rows
        assert store.events_after(10, 1) == [rows[1]]
        assert store.last_events(2) == rows[1:]
        assert store.last_event_id() == 12

    def test_pruning_keeps_the_newest_and_every_open_round(self, store: Store) -> None:
        job = a_job(store)
        opened = a_round(store, job)
        old, new = a_round(store, job, ended=True), a_round(store, job, ended=True)
        for row, digest in ((opened, "aa"), (old, "bb"), (new, "cc")):
            store.accept_updates([an_update(row.round, "bob", digest)])
        for version in (1, 2, 3):
            made = a_model(version, residual=f"{16 + version:064x}", optimizer=f"{32 + version:064x}")
            others: dict[str, Any] = {"transforms_blob": f"{64 + version:064x}", "control_digest": "of c"}
            store.publish(replace(made, control_blob=f"{48 + version:064x}", **others))
            store.add_evaluation(EvaluationRow(new.round, version, "bob", 1, 2, 0.5))
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
        assert [row.control_digest for row in store.models()] == ["of c", ""]
        assert store.named_blobs() == kept
        assert [len(store.evaluations(version)) for version in (1, 2, 3)] == [0, 1, 1]
        assert store.prune(2, 1, 99).rows == 0

    def test_a_job_still_knows_how_many_rounds_ended_after_they_were_pruned(self, store: Store) -> None:
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

    def test_the_model_that_an_open_round_starts_from_is_kept(self, store: Store) -> None:
        for version in (1, 2, 3):
            store.publish(a_model(version))
        job = a_job(store)
        row = store.create_round(RoundRow(0, job.job_id, 1, "waiting", 0.0, base_version=1))
        store.prune(keep_models=1, keep_update_rounds=1, keep_rounds=1)
        assert [model.version for model in store.models()] == [3, 1]
        store.update_round(replace(row, phase="abandoned", ended_at=1.0))
        store.prune(keep_models=1, keep_update_rounds=1, keep_rounds=1)
        assert [model.version for model in store.models()] == [3]

    def test_a_version_of_a_model_is_never_used_twice(self, store: Store) -> None:
        assert store.next_version() == 1
        for version in (1, 2, 3):
            store.publish(a_model(version))
        store.drop_models([2, 3])
        assert store.next_version() == 4
        store.drop_models([1])
        assert (store.models(), store.next_version()) == ([], 4)

    def test_the_time_left_is_saved_only_for_the_phase_that_the_round_is_in(self, store: Store) -> None:
        row = store.create_round(RoundRow(0, a_job(store).job_id, 1, "waiting", 0.0))
        store.update_round(replace(row, phase="training"))
        store.save_seconds_left(row.round, "waiting", 5.0)
        assert store.rounds()[0].seconds_left is None
        store.save_seconds_left(row.round, "training", 7.0)
        assert store.rounds()[0].seconds_left == 7.0

    def test_an_update_that_was_dropped_can_be_accepted_again(self, store: Store) -> None:
        row = a_round(store, a_job(store))
        store.accept_updates([an_update(row.round, "a"), an_update(row.round, "b")])
        dropped = store.drop_updates(row.round, ["a"])
        assert (dropped.rows, [update.client_id for update in store.updates_of(row.round)]) == (1, ["b"])
        assert store.accept_updates([an_update(row.round, "a")]) == [Acceptance.NEW]

    def test_updates_that_were_pruned_still_count(self, store: Store) -> None:
        job = a_job(store)
        for names in (("ann", "bob"), ("bob",), ("bob", "cleo"), ("bob",)):
            round_ = a_round(store, job, ended=True)
            store.accept_updates([an_update(round_.round, name) for name in names])
            store.prune(keep_models=1, keep_update_rounds=1, keep_rounds=99)
        assert store.updates_of(1) == []
        assert store.update_counts() == {"ann": 1, "bob": 4, "cleo": 1}

    def test_pruning_never_removes_the_newest_model(self, store: Store) -> None:
        store.publish(a_model(1))
        store.prune(0, 0, 0)
        assert store.models() == [a_model(1)]

    def test_a_blob_that_another_row_names_is_not_released(self, store: Store) -> None:
        job = a_job(store)
        for _ in range(2):
            store.accept_updates([an_update(a_round(store, job, ended=True).round, "bob")])
        pruned = store.prune(1, 1, 99)
        assert (pruned.rows, pruned.blobs) == (1, frozenset())

    def test_open_rounds_of_jobs_that_do_not_run_are_abandoned(self, store: Store) -> None:
        running, stopped = a_job(store), a_job(store)
        store.set_job_state(running.job_id, "running")
        orphan, kept = a_round(store, stopped), a_round(store, running)
        store.end_orphans()
        assert store.open_round() == kept
        ended = store.round(orphan.round)
        assert ended is not None
        assert (ended.phase, ended.reason, ended.ended_at is None) == ("abandoned", "job_ended", False)

    def test_a_token_is_revoked_once(self, store: Store) -> None:
        rows = [TokenRow(name, "ab" * 32, "client", name, at) for name, at in (("b", 1.0), ("a", 2.0))]
        for row in rows[::-1]:
            store.add_token(row)
        assert store.tokens() == rows
        store.revoke_token("b", 5.0)
        store.revoke_token("b", 6.0)
        store.revoke_token("nobody", 7.0)
        assert store.tokens() == [replace(rows[0], revoked_at=5.0), rows[1]]

    def test_a_probe_changes_nothing(self, store: Store) -> None:
        before = (store.run_id, store.epoch, a_job(store))
        store.probe()
        assert (store.run_id, store.epoch, *store.jobs()) == before

    def test_a_batch_without_updates_is_accepted(self, store: Store) -> None:
        assert store.accept_updates([]) == []


class TestClients:
    """What a store knows of clients' updates beyond those that it keeps."""

    def test_the_newest_accepted_update_of_each_client_stays_known(self, store: Store) -> None:
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

    def test_the_name_of_an_accepted_update_outlives_its_row(self, store: Store) -> None:
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
        # Of the updates that were pruned, only the newest is known.
        assert [store.accepted_name(number, "ann") for number in (first, second)] == ["", names[1]]
        assert [store.accepted_name(number, "bob") for number in (first, second, 99)] == ["", "", ""]

    @pytest.mark.parametrize("pruned", [False, True])
    def test_an_update_of_a_later_epoch_is_newer(self, store: Store, pruned: bool) -> None:
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

    def test_an_update_of_an_earlier_epoch_is_not_newer_even_if_it_is_accepted_later(self, store: Store) -> None:
        job = a_job(store)
        first, second = (a_round(store, job, ended=True).round for _ in range(2))
        store.accept_updates([an_update(first, "ann", "ab", epoch=5)])
        store.prune(keep_models=1, keep_update_rounds=0, keep_rounds=99)
        store.accept_updates([an_update(second, "ann", "cd", epoch=4)])
        wanted = {"ann": LastAccepted(5, first, "blake3-" + "ba" * 32)}
        assert store.last_accepted() == wanted
        store.prune(keep_models=1, keep_update_rounds=0, keep_rounds=99)
        assert store.last_accepted() == wanted

    def test_an_update_that_was_dropped_is_no_longer_the_newest(self, store: Store) -> None:
        job = a_job(store)
        first, second = a_round(store, job, ended=True).round, a_round(store, job).round
        store.accept_updates([an_update(first, "ann", "ab"), an_update(second, "ann", "cd")])
        store.drop_updates(second, ["ann"])
        assert store.last_accepted() == {"ann": LastAccepted(0, first, "blake3-" + "ba" * 32)}
        assert store.accepted_name(second, "ann") == ""

    def test_forgetting_a_client_leaves_only_its_updates_in_open_rounds(self, store: Store) -> None:
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

    def test_forgetting_a_client_does_not_release_a_blob_that_another_row_names(self, store: Store) -> None:
        number = a_round(store, a_job(store), ended=True).round
        store.accept_updates([an_update(number, "ann"), an_update(number, "bob")])
        assert store.forget_client("ann").blobs == frozenset()
        assert store.forget_client("bob").blobs == {"blake3-" + "ab" * 32}

    def test_a_new_run_has_epoch_0(self, store: Store) -> None:
        assert store.epoch == 0
