"""Leadership: one session leads, a silent one is ended, and one that beats is left alone, however busy it is."""

from datetime import datetime

import pytest
from sqlalchemy import text
from tests import postgres

from fedring.server.state.failures import Deposed
from fedring.server.state.shared import leadership
from fedring.server.state.shared.leadership import DatabaseSession, Leader, attempt, open_session


def leading(session: DatabaseSession, name: str) -> DatabaseSession:
    found = attempt(session, name)
    assert isinstance(found, DatabaseSession)
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
    assert (first.term, found.name) == (1, "one")
    first.check()
    first.close()
    second = leading(two, "two")
    assert second.term == 2
    second.close()


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


def test_the_session_of_a_silent_leader_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    address = postgres.shared().new_database()
    first, two = leading(open_session(address), "one"), open_session(address)
    monkeypatch.setattr(leadership, "SILENT_SECONDS", -1.0)
    second: object = attempt(two, "two")
    while not isinstance(second, DatabaseSession):  # the lock is free as soon as the other session has ended
        second = attempt(two, "two")
    assert second.term == 2
    with pytest.raises(Deposed, match="session with the database has ended"):
        first.check()
    first.beat()
    second.check()
    first.close()
    second.close()
