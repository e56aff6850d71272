"""The sweep: how often clients beat, and when a silent one is lost, by the clock that the test passes to it."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.host import Host

from fedring.rpc.errors import ComeBack, Stalled
from fedring.server.sessions.crowd import PaceSteering
from fedring.server.sessions.sessions import Session
from fedring.v1 import federation_pb2 as pb

QUICK, IDLE, LOST = 1.0, 30.0, 5.0
COMMAND = pb.ServerEvent(train=pb.TrainCmd(round=1))


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    """Yield the parts of a server with the default periods."""
    host = Host(tmp_path)
    config = host.config
    assert (config.heartbeat_seconds, config.idle_heartbeat_seconds, config.lost_after_seconds) == (QUICK, IDLE, LOST)
    yield host
    host.facts.close()


def watching(host: Host, client: str = "a", *, paced: bool = True) -> Session:
    """Return a session that has been greeted, and was heard at 1000 s."""
    session = host.join(client)
    session.paced, session.watching = paced, True
    while not session.outbox.empty():
        session.outbox.get_nowait()
    session.send(host.parts.sweep.greeting(session))
    session.heard = session.spoke = session.engaged = 1000.0
    return session


def periods(session: Session) -> list[float]:
    """Return the periods of the heartbeats that wait for the client."""
    events = [pb.ServerEvent.FromString(session.outbox.get_nowait()) for _ in range(session.outbox.qsize())]
    return [event.heartbeat.period_seconds for event in events if event.HasField("heartbeat")]


def test_an_idle_client_is_told_to_beat_seldom_and_is_lost_only_after_that(host: Host) -> None:
    session = watching(host)
    assert periods(session) == [IDLE]
    host.parts.sweep.look(session, 1000 + IDLE + LOST - 0.1)
    assert not session.closed.is_set()
    assert pytest.approx(session.look_at) == 1000 + IDLE + LOST
    host.parts.sweep.look(session, session.look_at)
    assert isinstance(session.reason, Stalled)


def test_a_client_that_gets_a_command_is_lost_as_soon_as_any_in_a_round_however_silent_it_was(host: Host) -> None:
    session = watching(host)
    session.heard = time.monotonic() - IDLE  # it may be dead since then
    session.ask(COMMAND)
    host.parts.sweep.look(session, time.monotonic())
    assert not session.closed.is_set()  # it was not asked to beat quickly until now
    assert session.look_at <= time.monotonic() + QUICK
    host.parts.sweep.look(session, session.hurried + LOST)
    assert isinstance(session.reason, Stalled)


def test_the_period_follows_the_clients_part_in_rounds(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    session, in_round = watching(host), True
    monkeypatch.setattr(host.rounds, "awaits", lambda client: in_round)
    session.ask(COMMAND)
    session.heard = session.spoke = 2000.0
    host.parts.sweep.look(session, 2000 + LOST - 1)
    in_round = False
    session.heard = 2000 + LOST - 1
    host.parts.sweep.look(session, 2000 + LOST)  # it may be drawn again at once: no message for each round
    periods(session)
    session.heard = 2000 + LOST
    host.parts.sweep.look(session, 2000 + 2 * LOST - 1)
    assert periods(session) == [IDLE]
    assert host.parts.sweep.greeting(watching(host, "b")) == host.parts.sweep.heartbeats[2]
    in_round = True
    assert pb.ServerEvent.FromString(host.parts.sweep.greeting(session)).heartbeat.period_seconds == QUICK


def test_the_server_repeats_a_period_seldom_and_beats_for_others_as_often_as_ever(host: Host) -> None:
    paced, plain = watching(host), watching(host, "b", paced=False)
    assert (periods(paced), periods(plain)) == ([IDLE], [0.0])
    for session, every in ((paced, 10 * IDLE), (plain, QUICK)):
        session.heard = 1000 + every
        host.parts.sweep.look(session, 1000 + every - 0.1)
        assert periods(session) == []
        host.parts.sweep.look(session, 1000 + every)
        assert periods(session) == [IDLE if session is paced else 0.0]
    plain.heard = 2000.0
    host.parts.sweep.look(plain, 2000 + LOST)
    assert isinstance(plain.reason, Stalled)


def test_a_client_that_no_round_needs_is_told_to_come_back_and_is_not_lost(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.sessions.pace = PaceSteering(1, IDLE)
    idle, needed = watching(host), watching(host, "b")
    monkeypatch.setattr(host.rounds, "awaits", lambda client: client == "b")
    for session in (idle, needed):
        session.heard = 1000 + IDLE
        host.parts.sweep.look(session, 1000 + IDLE - 0.1)
        assert not session.closed.is_set()
        host.parts.sweep.look(session, 1000 + IDLE)
    assert isinstance(idle.reason, ComeBack)
    assert not needed.closed.is_set()
    told = host.journal.unsaved()
    host.parts.reports.left(idle)
    assert host.journal.unsaved() == told
    assert host.sessions.returns.slowest == 0
    assert host.join("a").was_sent_away
    assert host.sessions.returns.slowest == 0


def test_a_client_that_never_watches_is_forgotten(host: Host) -> None:
    session = host.join("a")
    host.parts.sweep.look(session, session.joined + LOST - 0.1)
    assert host.sessions.get("a") is session
    host.parts.sweep.look(session, session.joined + LOST)
    assert host.sessions.get("a") is None
