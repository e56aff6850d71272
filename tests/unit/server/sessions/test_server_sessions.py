"""Sessions: a client has at most one, no other caller can take it over, and the server waits for no slow reader."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from fedring.rpc.contract import RESUME_SECRET, SESSION_KEY
from fedring.rpc.errors import RETRY_KEY, BadRequest, IdInUse, InLine, NoSession, NotAllowed, Overloaded, Superseded
from fedring.rpc.identity import IDENTITY, LOCAL, Identity, Role
from fedring.server.sessions.crowd import ARRIVING
from fedring.server.sessions.sessions import MOST_CALLS, OUTBOX, Session, Sessions
from fedring.v1 import federation_pb2 as pb


class Call:
    """The part of a call's context that sessions read."""

    def __init__(self, *metadata: tuple[str, str]) -> None:
        self._metadata = metadata
        self._callbacks: list[Callable[[Any], None]] = []

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._callbacks.append(callback)

    def end(self) -> None:
        for callback in self._callbacks:
            callback(self)

    def invocation_metadata(self) -> tuple[tuple[str, str], ...] | None:
        return self._metadata or None


def join(sessions: Sessions, client: str, caller: Identity = LOCAL, secret: str = "") -> Session:
    IDENTITY.set(caller)
    request = pb.JoinRequest(client_id=client, software="x" * 1000, resume_secret=secret)
    return sessions.join(request, "ipv4:127.0.0.1:5")


def test_a_call_belongs_to_the_session_that_it_names() -> None:
    sessions = Sessions(3)
    session = join(sessions, "a")
    assert sessions.of(Call(("other", "x"), (SESSION_KEY, session.session_id))) is session
    assert sessions.get("a") is session
    assert len(session.software) == 128
    for call in (Call(), Call((SESSION_KEY, "made up"))):
        with pytest.raises(NoSession):
            sessions.of(call)


def test_only_the_identity_that_opened_a_session_can_use_it() -> None:
    sessions = Sessions(3)
    ann, bob = Identity(Role.CLIENT, "ann"), Identity(Role.CLIENT, "bob")
    call = Call((SESSION_KEY, join(sessions, "ann", ann).session_id))
    assert sessions.of(call).client_id == "ann"
    IDENTITY.set(bob)
    with pytest.raises(NotAllowed) as refused:
        sessions.of(call)
    assert refused.value.reason == "other_session"


ANN = Identity(Role.CLIENT, "a")


@pytest.mark.parametrize("proof", ["secret", "identity"])
def test_a_client_that_proves_who_it_is_replaces_its_older_session(proof: str) -> None:
    sessions = Sessions(1)
    older = join(sessions, "a", ANN if proof == "identity" else LOCAL)
    newer = join(sessions, "a", older.owner, older.secret if proof == "secret" else "")
    assert older.closed.is_set()
    assert isinstance(older.reason, Superseded)
    with pytest.raises(NoSession):
        sessions.of(Call((SESSION_KEY, older.session_id)))
    assert not sessions.drop(older)  # the end of a replaced session is not the end of the client's session
    assert sessions.get("a") is newer
    assert sessions.drop(newer)
    assert len(sessions) == 0


@pytest.mark.parametrize("watching", [False, True])
@pytest.mark.parametrize("shown", ["", "0" * 32])
def test_a_live_session_stays_when_another_caller_asks_for_its_client_id(shown: str, watching: bool) -> None:
    sessions = Sessions(2, lost_after_seconds=7.5)
    live = join(sessions, "a")
    live.watching = watching
    with pytest.raises(IdInUse, match="a is here in another session: give each client an id of its own") as refused:
        join(sessions, "a", secret=shown)
    assert refused.value.metadata == (("fl-retry-seconds", "15"),)
    assert not live.closed.is_set()
    assert sessions.of(Call((SESSION_KEY, live.session_id))) is live
    sessions.drop(live)
    assert join(sessions, "a", secret=shown).secret != live.secret  # afterwards, the first caller gets the id


def test_a_session_has_the_secret_that_the_client_showed_or_a_new_one() -> None:
    sessions = Sessions(9)
    made = [join(sessions, name).secret for name in "abc"]
    assert all(RESUME_SECRET.fullmatch(secret) for secret in made)
    assert len(set(made)) == 3
    shown = "0123456789abcdef" * 2
    session = join(sessions, "d", secret=shown)
    assert session.secret == shown
    assert shown not in repr(session)


@pytest.mark.parametrize(
    "secret", ["0" * 31, "0" * 33, "A" * 32, "g" * 32, "0" * 32 + "\n", "\N{ARABIC-INDIC DIGIT ONE}" * 32]
)
def test_a_malformed_secret_is_refused(secret: str) -> None:
    sessions = Sessions(9)
    with pytest.raises(BadRequest, match="resume_secret must be") as refused:
        join(sessions, "a", secret=secret)
    assert secret not in str(refused.value)
    assert refused.value.reason == "bad_request"
    assert len(sessions) == 0


def test_at_most_max_clients_sessions_are_open() -> None:
    sessions = Sessions(2)
    first = join(sessions, "b")
    join(sessions, "a")
    with pytest.raises(Overloaded, match="max_clients=2 sessions are open; raise max_clients or stop a client"):
        join(sessions, "c")
    sessions.drop(first)
    join(sessions, "c")
    assert [session.client_id for session in sessions] == ["a", "c"]


def test_clients_that_come_while_many_are_greeted_get_places_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = Sessions(1000)
    arriving = [join(sessions, f"client-{number}") for number in range(ARRIVING)]
    waits = []
    now = time.monotonic()
    with monkeypatch.context() as stopped:
        stopped.setattr(time, "monotonic", lambda: now)
        for _ in range(3):
            with pytest.raises(InLine, match="come back in") as refused:
                sessions.check_line()
            waits += [float(value) for key, value in refused.value.metadata if key == RETRY_KEY]
    assert 1 < waits[0] < waits[1] < waits[2]
    sessions.arrived(arriving[0])
    sessions.check_line()  # one was greeted, so the next may come
    join(sessions, "one-more")
    with pytest.raises(InLine):
        sessions.check_line()
    sessions.drop(arriving[1])
    sessions.check_line()


@pytest.mark.parametrize("client", ["", "a/b", "a\n", "ä", "x" * 129])
def test_a_malformed_client_id_is_refused(client: str) -> None:
    with pytest.raises(BadRequest, match="client_id"):
        join(Sessions(1), client)


def test_a_client_that_does_not_read_is_cut_off() -> None:
    session = join(Sessions(1), "a")
    for _ in range(OUTBOX):
        session.send(pb.ServerEvent(heartbeat=pb.Heartbeat()))
    assert not session.closed.is_set()
    session.send(pb.ServerEvent(heartbeat=pb.Heartbeat()))
    assert isinstance(session.reason, Overloaded)
    session.close(Superseded())
    assert isinstance(session.reason, Overloaded)  # the first reason is kept


def test_one_client_cannot_use_up_all_calls() -> None:
    sessions = Sessions(2)
    session, other = join(sessions, "a"), join(sessions, "b")
    calls = [Call((SESSION_KEY, session.session_id)) for _ in range(MOST_CALLS)]
    for call in calls:
        sessions.of(call)
    with pytest.raises(Overloaded, match="calls of a"):
        sessions.of(Call((SESSION_KEY, session.session_id)))
    again = join(sessions, "a", secret=session.secret)  # a new session does not help
    with pytest.raises(Overloaded):
        sessions.of(Call((SESSION_KEY, again.session_id)))
    assert sessions.of(Call((SESSION_KEY, other.session_id))) is other
    calls[0].end()
    assert sessions.of(Call((SESSION_KEY, again.session_id))) is again
