"""Leadership: one session leads, a silent one is ended, and one that beats is left alone, however busy it is."""

import asyncio
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import NoReturn

import pytest
from sqlalchemy import Engine, event, text
from tests import postgres
from tests.waiting import until

from fedring.server import main, serving
from fedring.server.leading import _wait as leading_of
from fedring.server.state.failures import Deposed, StorageFailed
from fedring.server.state.lead import Lead
from fedring.server.state.shared import leadership
from fedring.server.state.shared.leadership import DatabaseSession, Leader, attempt, open_reader, open_session
from fedring.server.state.shared.replication import is_synchronous, may_have_lost_commits, note_timeline


def leading(session: DatabaseSession, name: str) -> DatabaseSession:
    found = attempt(session, name)
    while not isinstance(found, DatabaseSession):  # the lock is free as soon as the session before has ended
        found = attempt(session, name)
    return found


def last_beat(session: DatabaseSession) -> datetime:
    with session.engine.begin() as connection:
        found: datetime = connection.execute(text("SELECT at FROM leader_beat")).scalar_one()
    return found


def test_one_session_leads_and_each_leader_has_a_greater_term() -> None:
    address = postgres.shared().new_database()
    one, two = open_session(address), open_session(address)
    first = leading(one, "one")
    found = attempt(two, "two")
    assert isinstance(found, Leader)
    assert found.name == "one"
    first.check()
    first.close()
    second = leading(two, "two")
    assert second.term > first.term
    second.close()


def test_a_database_that_was_put_back_counts_on_above_all_terms_that_were_seen() -> None:
    one = open_session(postgres.shared().new_database())
    first = leading(one, "one")
    with first.engine.begin() as connection:
        connection.execute(text("UPDATE leader SET term = 3"))  # as in a backup of the first day
    first.close()
    two = open_session(one.engine.url.render_as_string())
    second = leading(two, "two")
    assert second.term >= first.term
    with two.engine.begin() as connection:  # its clock goes wrong, and is put right: the order stays
        connection.execute(text("UPDATE leader SET term = term + 1000000"))
    two.close()
    three = open_session(one.engine.url.render_as_string())
    assert leading(three, "three").term == second.term + 1_000_001
    three.close()


def test_a_database_that_has_gone_is_told_as_the_end_of_its_session_however_often_it_is_used() -> None:
    cluster = postgres.Cluster(postgres.folder_for_anybody())
    try:
        session = leading(open_session(cluster.new_database()), "one")
        cluster.stop("immediate")
        for _ in range(3):  # after the first, a new connection is tried
            with pytest.raises(Deposed):
                session.check()
        session.close()
    finally:
        cluster.stop()


def test_a_database_that_refuses_a_standbys_connection_lets_it_try_again(tmp_path: Path) -> None:
    with pytest.raises(StorageFailed, match="the shared state cannot be read now"):
        open_reader(f"postgresql://fedring@/fedring?host={tmp_path}")  # where nobody listens, as during a restart


def test_a_leader_beats_while_its_session_is_busy() -> None:
    address = postgres.shared().new_database()
    first, two = leading(open_session(address), "one"), open_session(address)
    with first.engine.begin():  # as while a large upload is being kept
        before = last_beat(two)
        first.beat()
        assert last_beat(two) > before
    first.check()
    first.close()
    two.close()


def test_a_leader_beats_while_it_opens_a_large_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address, told, led = postgres.shared().new_database(), list[str](), list[DatabaseSession]()
    other = open_session(address)

    async def recover(*_: object, session: DatabaseSession, **__: object) -> NoReturn:
        led.append(session)
        before = last_beat(other)
        until(lambda: len(told) > 1)  # the event loop stands still meanwhile
        assert last_beat(other) > before
        raise TimeoutError("the state is too large for this test")

    monkeypatch.setattr(serving, "recover", recover)
    monkeypatch.setattr(serving, "sd_notify", told.append)
    (tmp_path / "objects").mkdir()
    keys = [f"state_dir={tmp_path / 'state'}", f"state_url={address}", f"blob_url={(tmp_path / 'objects').as_uri()}"]
    with ExitStack() as stack, pytest.raises(TimeoutError):
        asyncio.run(serving.serve(main.load(keys, {}), stack, check_only=False, stop_event=asyncio.Event))
    assert set(told) == {"WATCHDOG=1"}
    for session in (*led, other):
        session.close()


def test_a_leader_beats_while_its_work_as_a_standby_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = postgres.shared().new_database()
    first, other = leading(open_session(address), "one"), open_session(address)
    beats, led = list[bool](), list[DatabaseSession]()

    async def stand_by(*_: object) -> None:
        first.close()
        try:
            await asyncio.Event().wait()
        finally:  # as while the last look at a large state ends
            begun = last_beat(other)
            until(lambda: last_beat(other) > begun)
            beats.append(True)

    async def recover(*_: object, session: DatabaseSession, **__: object) -> NoReturn:
        led.append(session)
        raise TimeoutError("this test ends here")

    monkeypatch.setattr(serving, "stand_by", stand_by)
    monkeypatch.setattr(serving, "recover", recover)
    (tmp_path / "objects").mkdir()
    keys = [f"state_dir={tmp_path / 'state'}", f"state_url={address}", f"blob_url={(tmp_path / 'objects').as_uri()}"]
    with ExitStack() as stack, pytest.raises(TimeoutError):
        asyncio.run(serving.serve(main.load(keys, {}), stack, check_only=False, stop_event=asyncio.Event))
    assert beats == [True]
    for session in (*led, other):
        session.close()


def test_the_session_of_a_silent_leader_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    address = postgres.shared().new_database()
    first, two = leading(open_session(address), "one"), open_session(address)
    monkeypatch.setattr(leadership, "SILENT_SECONDS", -1.0)
    second = leading(two, "two")
    assert second.term > first.term
    with pytest.raises(Deposed, match="session with the database has ended"):
        first.check()
    first.beat()
    second.check()
    first.close()
    second.close()


@pytest.mark.parametrize("before", [False, True], ids=["the first", "a later one"])
def test_a_server_whose_machine_goes_between_its_lock_and_its_term_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    address = postgres.shared().new_database()
    if before:
        (earlier := leading(open_session(address), "before")).close()
        assert earlier.term
    one, two = open_session(address), open_session(address)
    with one.engine.begin() as connection:
        assert connection.execute(text(f"SELECT pg_try_advisory_lock({leadership.LOCK})")).scalar_one()
    assert attempt(two, "two") is None, "it may just be about to begin its term"
    monkeypatch.setattr(leadership, "SILENT_SECONDS", -1.0)
    until(lambda: isinstance(attempt(two, "two"), DatabaseSession))
    for session in (one, two):
        session.close()


@pytest.mark.parametrize("state", ["57P01", "08P01"])
def test_a_standby_whose_database_fails_goes_on_waiting_and_says_so_once(
    tmp_path: Path, state: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It asks twice a second, and not all the time."""
    caplog.set_level("INFO")
    address = postgres.shared().new_database()
    first, waiting = leading(open_session(address), "one"), open_session(address)
    (tmp_path / "objects").mkdir()
    (tmp_path / "state").mkdir()
    keys = [f"state_dir={tmp_path / 'state'}", f"state_url={address}", f"blob_url={(tmp_path / 'objects').as_uri()}"]
    asked, refused = list[float](), 4

    def refuse(_connection: object, _cursor: object, statement: str, values: object, *_: object) -> tuple[str, object]:
        if "pg_try_advisory_lock" in statement:
            asked.append(time.monotonic())
            if len(asked) <= refused:
                statement = f"DO $$ BEGIN RAISE EXCEPTION 'go away' USING ERRCODE = '{state}'; END $$"
                values = {}
        return statement, values

    event.listen(waiting.engine, "before_cursor_execute", refuse, retval=True)

    async def wait() -> Lead | DatabaseSession:
        return await anext(leading_of(main.load(keys, {}).config, waiting, asyncio.Event()))

    assert getattr(asyncio.run(wait()), "leader", "") == "one"
    assert len(asked) == refused + 1
    assert asked[-1] - asked[0] > 0.4 * refused
    said = [record.message for record in caplog.records if record.name == "fedring.server.leading"]
    assert [line.partition(":")[0] for line in said] == [
        "goes on waiting",
        "the database can be used again",
        "waits as a standby",
    ]
    for session in (first, waiting):
        session.close()


def test_a_leader_that_freezes_in_the_middle_of_a_beat_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    address = postgres.shared().new_database()
    first, two = leading(open_session(address), "one"), open_session(address)
    monkeypatch.setattr(leadership, "SILENT_SECONDS", -1.0)
    with two.engine.begin() as connection:
        connection.execute(text("SET lock_timeout = '5s'"))
    successors: list[DatabaseSession] = []

    def freeze(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if "UPDATE leader_beat" in statement:
            successors.append(leading(two, "two"))

    event.listen(first.beats, "after_cursor_execute", freeze)
    first.beat()
    (second,) = successors
    second.check()
    first.close()
    second.close()


def test_a_session_that_is_about_to_end_has_ended() -> None:
    session = leading(open_session(postgres.shared().new_database()), "one")
    query = "DO $$ BEGIN RAISE EXCEPTION 'shutting down' USING ERRCODE = '57P01'; END $$"
    with pytest.raises(Deposed, match="shutting down"), session.engine.begin() as connection:
        connection.execute(text(query))
    session.close()


@pytest.mark.parametrize("asked", [is_synchronous, may_have_lost_commits, note_timeline])
def test_a_database_that_breaks_off_a_question_about_itself_has_not_answered_it(
    asked: Callable[[Engine], object],
) -> None:
    session = leading(open_session(postgres.shared().new_database()), "one")
    state = ["57014"]  # it was cancelled, as by statement_timeout

    def refuse(_connection: object, _cursor: object, statement: str, values: object, *_: object) -> tuple[str, object]:
        if "synchronous" in statement:
            statement = f"DO $$ BEGIN RAISE EXCEPTION 'canceling' USING ERRCODE = '{state[0]}'; END $$"
        return statement, values

    event.listen(session.engine, "before_cursor_execute", refuse, retval=True)
    with pytest.raises(StorageFailed, match="canceling"):
        asked(session.engine)
    state[0] = "57P01"  # the session ends
    with pytest.raises(Deposed, match="canceling"):
        asked(session.engine)
    session.close()


def test_the_clock_of_a_server_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    address, right = postgres.shared().new_database(), time.time()
    first = leading(open_session(address), "one")
    two = open_session(address)
    for wrong in (right - 3600, right + 3600):
        monkeypatch.setattr(time, "time", lambda wrong=wrong: wrong)
        first.beat()
        found = attempt(two, "two")
        assert isinstance(found, Leader)
        assert found.silent_seconds < 60
        assert abs(found.since - right) < 60
        first.check()
    first.close()
    second = leading(two, "two")
    assert 0 < second.term - first.term < 60
    second.close()
