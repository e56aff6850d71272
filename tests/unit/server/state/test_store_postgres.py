"""The store in PostgreSQL: which of its errors are told again and again, and which once."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine, text
from tests import postgres

from fedring.server import leading
from fedring.server.config import ServerConfig
from fedring.server.leading import look_after_lead
from fedring.server.state.blobs import FileBlobs
from fedring.server.state.facts import Facts
from fedring.server.state.failures import Deposed, StorageError, StorageFailed, StoreError
from fedring.server.state.shared.leadership import DatabaseSession, attempt, open_session
from fedring.server.state.sql.store import Store
from fedring.server.state.sql.transactions import Database

IMPATIENT = "&options=-c%20lock_timeout%3D20"  # milliseconds


@pytest.fixture
def url() -> str:
    return postgres.shared().new_database()


@contextmanager
def held(url: str, lock: str) -> Iterator[None]:
    """Let another program hold a lock."""
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text(lock))
        yield
    engine.dispose()


@pytest.mark.parametrize(
    ("state", "kind", "reason"),
    [
        ("40001", StorageFailed, "disk_error"),  # serialization_failure
        ("40P01", StorageFailed, "disk_error"),  # deadlock_detected
        ("55P03", StorageFailed, "disk_error"),  # lock_not_available
        ("25006", StorageFailed, "disk_error"),  # read_only_sql_transaction
        ("53100", StorageFailed, "disk_full"),
        ("53200", StorageFailed, "disk_full"),  # out_of_memory
        ("53300", StorageFailed, "disk_error"),  # too_many_connections
        ("57014", StorageFailed, "disk_error"),  # query_canceled
        ("58030", StorageFailed, "disk_error"),  # io_error
        ("XX001", StoreError, "corrupt"),
        ("XX002", StoreError, "corrupt"),
        ("23505", StoreError, "database"),  # unique_violation
        ("42P01", StoreError, "database"),  # undefined_table
    ],
)
def test_an_error_is_final_unless_a_later_attempt_may_succeed(
    url: str, state: str, kind: type[StorageError], reason: str
) -> None:
    engine = create_engine(url)
    raising = text(f"DO $$ BEGIN RAISE EXCEPTION 'so it is' USING ERRCODE = '{state}'; END $$")
    with pytest.raises(kind, match="so it is") as caught, Database(engine).transaction() as connection:
        connection.execute(raising)
    assert (type(caught.value), caught.value.reason) == (kind, reason)
    engine.dispose()


def test_a_database_that_another_program_holds_is_tried_again_later(url: str) -> None:
    store = Store(f"{url}{IMPATIENT}")
    told = pytest.raises(StorageFailed, match="lock timeout: another program uses the database")
    with held(url, "LOCK TABLE meta IN ACCESS EXCLUSIVE MODE"), told:
        store.probe()
    store.probe()
    store.close()


async def test_a_leader_whose_lead_cannot_be_looked_at_for_a_moment_leads_on(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leading, "BEAT_SECONDS", 0.0)
    session = attempt(open_session(f"{url}{IMPATIENT}"), "one")
    assert isinstance(session, DatabaseSession)
    facts = Facts(Store(session.engine), FileBlobs(tmp_path), threads=1)
    looks = asyncio.create_task(look_after_lead(session, facts))
    async with asyncio.timeout(60):
        with held(url, "SELECT 1 FROM leader FOR UPDATE"):
            await facts.storage.fails.wait()
        facts.storage.mend()
        end_sessions(url)
        with pytest.raises(Deposed):
            await looks
    facts.close()
    session.close()


async def test_a_standby_that_cannot_look_at_the_state_blames_neither_half_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise StorageFailed("disk_error", "canceling statement due to lock timeout")

    config = ServerConfig.model_validate({"state_dir": tmp_path})
    session, stop = DatabaseSession(create_engine("sqlite://"), create_engine("sqlite://")), asyncio.Event()
    monkeypatch.setattr(leading, "open_session", lambda _: session)
    monkeypatch.setattr(leading, "check_role", refuse)
    stop.set()
    assert await leading.lead(config, stop, lambda _: asyncio.sleep(0)) is None
    assert "the shared state cannot be checked now: disk_error: canceling statement" in caplog.text


def end_sessions(url: str) -> None:
    """End all other sessions with a database."""
    engine: Engine = create_engine(url)
    query = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid != "
    with engine.begin() as connection:
        connection.execute(text(f"{query} pg_backend_pid()"))
    engine.dispose()
