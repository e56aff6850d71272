"""The promises of a store about rounds with secure aggregation, for each implementation."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.store_implementations import IMPLEMENTATIONS, Implementation
from tests.unit.rows import a_job, a_model, a_round

from fedring.server.state.failures import StorageError
from fedring.server.state.rows import Acceptance
from fedring.server.state.sql.schema import SecureMessageRow, SecureRoundRow
from fedring.server.state.sql.store import Store


@pytest.fixture(params=IMPLEMENTATIONS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    implementation: Implementation = request.param
    opened = implementation(tmp_path, 10)
    yield opened
    opened.close()


def kept(store: Store, number: int) -> tuple[list[SecureRoundRow], list[SecureMessageRow]]:
    return store.kept.of_round(SecureRoundRow, number), store.kept.of_round(SecureMessageRow, number)


def test_of_a_client_one_secure_message_of_each_kind_is_kept(store: Store) -> None:
    number = a_round(store, a_job(store)).round
    rows = [SecureMessageRow(number, name, kind, b"1") for name in ("ann", "bob") for kind in ("keys", "shares")]
    assert [store.kept.add(row, "message") for row in reversed(rows)] == [Acceptance.NEW] * 4
    assert store.kept.add(rows[0], "message") is Acceptance.ALREADY
    assert store.kept.add(replace(rows[0], body=b"2"), "message") is Acceptance.OTHER
    assert kept(store, number) == ([], rows)
    with pytest.raises(StorageError):
        store.kept.add(replace(rows[0], round=99), "message")


def test_what_was_decided_in_a_secure_round_goes_with_its_end(store: Store) -> None:
    job = a_job(store)
    first, second = a_round(store, job), a_round(store, job)
    for opened in (first, second):
        store.kept.add(SecureMessageRow(opened.round, "ann", "keys", b"1"), "message")
        store.kept.put(SecureRoundRow(opened.round, 2, []), "start")
    decided = SecureRoundRow(second.round, 2, [{"members": ["ann"], "reason": ""}])
    store.kept.put(decided, "roster")
    store.models.publish(
        a_model(1, number=first.round), replace(first, phase="published", model_version=1, ended_at=8.0)
    )
    assert kept(store, first.round) == ([], [])
    assert kept(store, second.round) == ([decided], [SecureMessageRow(second.round, "ann", "keys", b"1")])
    store.rounds.replace(replace(second, phase="abandoned", ended_at=9.0))
    assert kept(store, second.round) == ([], [])
